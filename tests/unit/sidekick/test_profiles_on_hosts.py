"""Every shipped profile on every recorded host: applied, switched, released without residue."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from fake_host import PROFILES
from recorded import NAMES, RecordedHost

from sidekick.apply import ApplyRun
from sidekick.facts import read_facts
from sidekick.lint import Severity, lint_profiles
from sidekick.profile import Library
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.settings import SETTINGS

SHIPPED = Library([PROFILES], SETTINGS).names()
BOOTS = {"batch"}
"""Profiles that need a boot, which a tree cannot do."""
LIVE = [name for name in SHIPPED if name not in BOOTS]
UNABLE = {
    ("turbo", "vm"),
    ("turbo", "debian-12"),
    ("turbo", "intel-no-turbo"),
}
"""Hosts that lack what a profile requires."""


def switch(fake: RecordedHost, name: str) -> Report:
    return ApplyRun(fake.host(), fake.state, fake.target(name) if name else Target()).carry_out()


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_is_applied_again_and_released(tmp_path: Path, name: str) -> None:
    fake = RecordedHost(tmp_path, name)
    before = fake.everything()
    for profile in LIVE:
        report = switch(fake, profile)
        if (profile, name) in UNABLE:
            assert report.state is ProfileState.DEGRADED
            assert not report.rolled_back or fake.everything() == before
        else:
            assert report.state is ProfileState.VERIFIED, (profile, report)
            assert {s.outcome for s in report.settings} <= {
                ApplyOutcome.APPLIED,
                ApplyOutcome.ALREADY,
                ApplyOutcome.UNDONE,
                ApplyOutcome.UNSUPPORTED,
                ApplyOutcome.PARTIAL,
            }
            assert all(s.detail for s in report.settings if s.outcome is ApplyOutcome.UNSUPPORTED)
            again = ApplyRun(fake.host(), fake.state, fake.target(profile))
            assert again.observation.plan.changes == ()
        switch(fake, "")
        assert fake.everything() == before, profile


def every_pair(names: list[str]) -> list[str]:
    """Return a walk in which each name directly follows each other name once."""
    first, *rest = names
    if not rest:
        return names
    there_and_back = [name for other in rest[1:] for name in (other, first)]
    return [first, *there_and_back, *every_pair(rest), first]


@pytest.mark.behaviour("F-73", "HP12")
@pytest.mark.parametrize("name", ["amd", "debian-12", "intel", "vm"])
def test_any_profile_after_any_other_is_as_if_it_were_the_first(tmp_path: Path, name: str) -> None:
    fake = RecordedHost(tmp_path, name)
    before = fake.everything()
    able = [profile for profile in LIVE if (profile, name) not in UNABLE]
    alone = {}
    for profile in able:
        switch(fake, profile)
        alone[profile] = fake.everything()
        switch(fake, "")
        assert fake.everything() == before, profile
    walk = every_pair(able)
    assert {*itertools.pairwise(walk)} == {*itertools.permutations(able, 2)}
    for number, profile in enumerate(walk):
        switch(fake, profile)
        assert fake.everything() == alone[profile], walk[max(0, number - 1) : number + 1]
    switch(fake, "")
    assert fake.everything() == before


@pytest.mark.behaviour("HP7")
def test_the_memcache_profile_has_the_shape_of_the_paper(tmp_path: Path) -> None:
    fake = RecordedHost(tmp_path, "intel")
    wanted = {w.setting: w.value for w in fake.target("memcache").wanted}
    own = Library([PROFILES], SETTINGS).load("memcache", read_facts(fake.fs))
    assert wanted["affinity.irqs"] == "0-5,18-23"
    assert wanted["affinity.told"] == "irqs=0-5,18-23 busy=6 workers=7-17,24-35"
    assert wanted["sysctl.net.ipv4.tcp_mem"].split() == ["2742997", "4114496", "5485994"]
    assert "bpf.max_sample_rate" in wanted
    network = [
        s for s in own.section("sysctl") if s.startswith(("net.", "kernel.sched", "kernel.timer"))
    ]
    assert len(network) >= 17


@pytest.mark.behaviour("HP3", "HP7")
def test_the_web_profile_takes_huge_pages_of_both_sizes(tmp_path: Path) -> None:
    fake = RecordedHost(tmp_path, "two-nodes")
    wanted = {w.setting: w.value for w in fake.target("web").wanted}
    pages = {name: value for name, value in wanted.items() if name.startswith("hugepages.")}
    assert pages == {
        "hugepages.1g.node0": "2",
        "hugepages.1g.node1": "2",
        "hugepages.2m.node0": "512",
        "hugepages.2m.node1": "512",
    }


@pytest.mark.behaviour("HP7", "HP10")
def test_the_shapes_of_the_paper_are_there() -> None:
    shapes = {
        *("base", "default", "web", "memcache", "machine", "flash"),
        *("turbo", "batch", "training", "latency"),
    }
    assert shapes <= set(SHIPPED)


def test_every_kind_and_key_has_its_place_in_the_documentation() -> None:
    page = (PROFILES.parent / "docs" / "host-settings.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `[")}
    assert rows.keys() == {f"[{kind}]" for kind in SETTINGS}
    for setting in SETTINGS.values():
        if isinstance(setting.section, type) and issubclass(setting.section, msgspec.Struct):
            keys = set(setting.section.__struct_fields__) - {"required"}
            assert {k for k in keys if f"`{k}`" not in rows[f"[{setting.kind}]"]} == set()


@pytest.mark.behaviour("HP9")
def test_every_shipped_profile_is_explained() -> None:
    page = (PROFILES / "README.md").read_text()
    assert [name for name in SHIPPED if f"| `{name}` |" not in page] == []


def test_lint_has_nothing_against_any_shipped_profile(tmp_path: Path) -> None:
    fake = RecordedHost(tmp_path, "intel")
    library = Library([PROFILES], SETTINGS)
    found = lint_profiles(library, SHIPPED, read_facts(fake.fs), fake.host())
    assert [f for f in found if f.severity is Severity.ERROR or "already" in f.reason] == []
