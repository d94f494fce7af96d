"""Profiles: found, rendered, inherited, decoded, with all their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import PROFILES, FakeHost, shipped

from agent.errors import ConfigError, NotFound, Unprocessable
from sidekick.profile import HostFacts, Library, facts_of
from sidekick.report import Wanted
from sidekick.standing import target_of

FACTS = HostFacts(
    hostname="m1",
    kernel="6.12.0",
    cpu_model="Test",
    cpus=4,
    sockets=1,
    numa_nodes=1,
    memory_bytes=1 << 30,
    memory_mib=1024,
)


def library(folder: Path, **files: str) -> Library:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return Library([folder])


def test_a_child_overrides_its_parent_name_by_name(tmp_path: Path) -> None:
    found = library(
        tmp_path,
        base="description='b'\n[sysctl]\n'vm.swappiness'=60\n'kernel.panic'=10\n"
        "[kernel]\ncmdline=['nosmt', 'preempt=full']",
        web="description='w'\nextends='base'\n[sysctl]\n'vm.swappiness'=1\n"
        "[kernel]\ncmdline=['preempt=none']",
    ).load("web", FACTS)
    assert {k: v.value for k, v in found.sysctl.items()} == {"vm.swappiness": 1, "kernel.panic": 10}
    assert found.cmdline == ("nosmt", "preempt=none")
    assert found.lineage == ("web", "base")
    assert found.sources["sysctl.vm.swappiness"] == "web"
    assert found.sources["sysctl.kernel.panic"] == "base"
    assert found.sources["kernel.nosmt"] == "base"


def test_facts_of_the_host_fill_the_template(tmp_path: Path) -> None:
    text = (
        "description='{{ host.hostname }}'\n[sysctl]\n'vm.dirty_bytes'={{ host.memory_mib // 4 }}"
    )
    found = library(tmp_path, web=text).load("web", FACTS)
    assert found.description == "m1"
    assert found.sysctl["vm.dirty_bytes"].value == 256


def test_the_first_folder_that_has_a_profile_wins(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    library(mine, web="description='mine'")
    library(theirs, web="description='theirs'", cache="description='c'")
    both = Library([mine, tmp_path / "none", theirs])
    assert both.load("web", FACTS).description == "mine"
    assert both.names() == ["cache", "web"]


def test_an_unknown_name_in_a_template_says_where_and_what_there_is(tmp_path: Path) -> None:
    text = "description='w'\n[sysctl]\n'vm.swappiness'={{ host.memry }}"
    with pytest.raises(ConfigError, match=r"web.toml, line 3: .*memry") as caught:
        library(tmp_path, web=text).load("web", FACTS)
    assert "host.memory_mib" in caught.value.hint


@pytest.mark.parametrize(
    "expression",
    [
        "{{ nothing }}",
        "{{ 1 // 0 }}",
        "{{ host.memory_mib + 'x' }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ host.__class__.__init__.__globals__ }}",
        "{% include 'base.toml' %}",
        "{{ range(3) }}",
        "{{ [1, 2] | random }}",
        "{{ host.cpus.missing() }}",
    ],
)
def test_a_template_gets_nothing_but_facts(tmp_path: Path, expression: str) -> None:
    text = f"description='w'\n[sysctl]\n'vm.swappiness'={expression}"
    with pytest.raises(ConfigError, match="cannot render profile"):
        library(tmp_path, web=text).load("web", FACTS)


def test_every_error_of_a_file_is_told_with_its_field(tmp_path: Path) -> None:
    text = (
        "colour='blue'\nextends=3\n[sysctl]\n'vm.swappiness'=1.5\n"
        "'kernel.panic'={value=1, wanted=2}\n[hugepages]\npages_2m=-1\nsize=2\n"
        "[kernel]\ncmdline=['nosmt', 7]"
    )
    with pytest.raises(ConfigError, match="has 8 errors") as caught:
        library(tmp_path, web=text).load("web", FACTS)
    assert sorted(e.field for e in caught.value.errors) == [
        "colour",
        "description",
        "extends",
        "hugepages.pages_2m",
        "hugepages.size",
        "kernel.cmdline[1]",
        "sysctl.kernel.panic",
        "sysctl.vm.swappiness",
    ]
    assert all(e.reason for e in caught.value.errors)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"web": "description='w'\n[sysctl\n"}, "is not TOML"),
        ({"web": "description='w'\nextends='web'"}, "web -> web"),
        (
            {"web": "description='w'\nextends='a'", "a": "description='a'\nextends='web'"},
            "web -> a -> web",
        ),
        ({"web": "description='w'\nextends='gone'"}, "extends 'gone'"),
        ({"web": "description='w'" + " " * 70_000}, "is larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        library(tmp_path, **files).load("web", FACTS)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "web.toml").write_bytes(b"description='\xff'")
    with pytest.raises(ConfigError, match="cannot read profile"):
        Library([tmp_path]).load("web", FACTS)


@pytest.mark.parametrize("name", ["wbe", "../web", "/etc/passwd", "", "WEB"])
def test_a_name_that_is_no_profile_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        library(tmp_path, web="description='w'").load(name, FACTS)
    assert "known: web" in caught.value.hint


def test_all_settings_are_checked_before_any_is_wanted(fake: FakeHost, tmp_path: Path) -> None:
    text = (
        "description='w'\n[sysctl]\n'vm.nr_hugepages'=3\n'vm..x'=1\n'kernel.core_pattern'='|x'\n"
        "'vm.dirty_bytes'=4096000\n'vm.dirty_ratio'=3\n'kernel.panic'=\"1\\n2\"\n"
        "[hugepages]\npages_2m=1\npercent_of_memory=3\n[kernel]\ncmdline=['init=/bin/sh']"
    )
    profile = library(tmp_path, web=text).load("web", FACTS)
    with pytest.raises(ConfigError) as caught:
        target_of(profile, fake.host())
    assert [e.field for e in caught.value.errors] == [
        "sysctl.vm.nr_hugepages",
        "sysctl.vm..x",
        "sysctl.kernel.core_pattern",
        "sysctl.vm.dirty_bytes",
        "sysctl.kernel.panic",
        "hugepages",
        "kernel.cmdline",
    ]


@pytest.mark.parametrize("memory_mib", [960, 1024, 4096, 65536])
@pytest.mark.parametrize("name", Library([PROFILES]).names())
def test_the_shipped_profiles_fit_hosts_of_any_size(
    tmp_path: Path, name: str, memory_mib: int
) -> None:
    fake = FakeHost(tmp_path, memory_mib=memory_mib)
    assert shipped(fake, name).wanted


def test_the_shipped_profiles_differ_where_it_shows(fake: FakeHost) -> None:  # HP2
    facts = facts_of(fake.host().hardware)
    library = Library([PROFILES])
    loaded = {name: library.load(name, facts) for name in ("web", "cache", "batch")}
    for sysctl in ("vm.swappiness", "net.core.somaxconn"):
        assert len({p.sysctl[sysctl].value for p in loaded.values()}) == 3
    assert loaded["cache"].hugepages
    assert [name for name, p in loaded.items() if p.cmdline] == ["batch"]


def test_a_profile_that_starves_the_host_is_refused(fake: FakeHost) -> None:  # F-67
    text = "description='w'\n[hugepages]\npages_2m=300"
    profile = library(fake.root, greedy=text).load("greedy", FACTS)
    with pytest.raises(Unprocessable, match=r"600 MiB of 1024 MiB.*512 MiB must stay") as caught:
        target_of(profile, fake.host())
    assert caught.value.hint == "at most 256 pages of 2 MiB fit this host"


def test_a_value_wanted_knows_the_file_that_says_so(fake: FakeHost) -> None:
    wanted = {w.setting: w for w in shipped(fake, "web").wanted}
    assert wanted["sysctl.vm.swappiness"] == Wanted(
        setting="sysctl.vm.swappiness", value="10", source="web"
    )
    assert wanted["sysctl.kernel.panic"].source == "base"
    assert not wanted["sysctl.kernel.numa_balancing"].required
