"""Every applied change can be undone exactly."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_host import ROOT_LINE, SYSCTLS, Crash, FakeHost, a_profile, a_target
from hypothesis import given, settings
from hypothesis import strategies as st

from sidekick.apply import ApplyRun
from sidekick.boot import LINE, BootLine
from sidekick.bootline import compose, group_of, in_force, owned_groups, split, without_owned
from sidekick.plan import make_plan
from sidekick.record import Target
from sidekick.report import SettingChange, WantedSetting
from sidekick.settings import SETTINGS
from sidekick.settings.hugepages import Hugepages, HugepagesSetting
from sidekick.settings.kernel import ALLOWED, CONTROLLERS_OF_LIMITS, KernelSetting
from sidekick.settings.sysctl import SysctlSetting

ACTIONS = {"vm.drop_caches", "vm.compact_memory"}
COUNTERPARTS = {"vm.dirty_ratio", "vm.dirty_background_ratio"}
NAMES = st.sampled_from(sorted(SYSCTLS.keys() - ACTIONS))
NUMBERS = st.integers(1, 200)
SYSCTL = st.dictionaries(
    NAMES.filter(lambda n: n not in COUNTERPARTS), NUMBERS, max_size=6
) | st.dictionaries(NAMES.filter(lambda n: not n.endswith("_bytes")), NUMBERS, max_size=6)
ARGUMENTS = st.lists(
    st.builds(
        "{}={}".format, st.sampled_from(["preempt", "nosmt", "isolcpus"]), st.sampled_from("abc")
    ),
    unique_by=lambda a: a.partition("=")[0],
    max_size=3,
)
FOREIGN = st.lists(
    st.sampled_from(
        ["root=/dev/vda1", "ro", "quiet", "preempt=a", "nosmt=d", 'x="y  z"', "iso-l=1", "panic=1"]
    ),
    unique_by=lambda a: a.partition("=")[0],
).map(" ".join)
PROFILES = st.fixed_dictionaries(
    {"sysctl": SYSCTL, "cmdline": ARGUMENTS.map(tuple)},
    optional={"hugepages": st.builds(lambda n: Hugepages(pages_2m=n), st.integers(0, 64))},
)


def a_host() -> FakeHost:
    return FakeHost(Path(tempfile.mkdtemp()), nodes=2)


@pytest.fixture(scope="module", autouse=True)
def _folders_that_go_away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("hosts")))
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@settings(max_examples=30, deadline=None)
@given(SYSCTL)
def test_undoing_sysctls_in_reverse_brings_every_bit_back(wanted: dict[str, int]) -> None:
    fake, setting = a_host(), SysctlSetting()
    before = fake.live()
    values = [WantedSetting(setting=f"sysctl.{k}", value=str(v)) for k, v in wanted.items()]
    observed = setting.observe(fake.host(), [w.setting for w in values])
    changes = setting.plan(values, observed, {})
    for change in changes:
        setting.apply(fake.host(), change)
    for change in reversed(changes):
        setting.undo(fake.host(), change)
    assert fake.live() == before


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 64), st.integers(0, 64), st.integers(0, 80))
def test_undoing_pages_brings_every_page_back(before: int, after: int, free: int) -> None:
    fake, setting = a_host(), HugepagesSetting()
    change = SettingChange(setting="hugepages.2m.node1", before=str(before), after=str(after))
    setting.undo(fake.host(), change)
    fake.fs.free_pages["node1"] = free
    setting.apply(fake.host(), change)
    if fake.pages(1) >= before or free >= before:
        setting.undo(fake.host(), change)
        assert fake.pages(1) == before


@given(FOREIGN, ARGUMENTS)
def test_the_host_gets_its_command_line_back(own: str, arguments: list[str]) -> None:
    groups = {group_of(a): (a,) for a in arguments}
    line = compose(own, groups)
    assert compose(line, groups) == line
    assert all(in_force(line, group, wanted) for group, wanted in groups.items())
    assert without_owned(line, owned_groups(own, groups)) == own
    assert without_owned(own, owned_groups(own, groups)) == own, "it may not have been booted yet"


@pytest.mark.behaviour("F-68")
@given(st.text(max_size=40), st.text(max_size=40))
def test_only_harmless_arguments_pass(key: str, value: str) -> None:
    for argument in (f"{key}={value}", f"nosmt={value}", f"nosmt {value}", f"{key}"):
        if not KernelSetting().check(a_profile(cmdline=(argument,))):
            name = argument.partition("=")[0]
            assert name in ALLOWED
            assert name != "cgroup_disable" or not CONTROLLERS_OF_LIMITS & set(value.split(","))
            assert split(argument) == [argument]
            assert not set(argument) & set(" \t\n\r\"'$`;&|<>\\(){}*?[]!#~\0")


@settings(max_examples=25, deadline=None)
@given(PROFILES)
def test_a_plan_is_the_same_whenever_it_is_made_and_empty_once_it_is_done(
    parts: dict[str, object],
) -> None:
    fake = a_host()
    target = a_target(fake, **parts)
    record = fake.state.load()
    first = ApplyRun(fake.host(), fake.state, target).observation.plan
    assert ApplyRun(fake.host(), fake.state, target).observation.plan == first
    assert fake.state.load() == record
    fake.apply(target)
    again = ApplyRun(fake.host(), fake.state, target).observation.plan
    assert all(c.setting == LINE and c.before == c.after for c in again.changes)
    assert make_plan([*SETTINGS.values()], [], {}, {}).changes == ()


LOADERS = st.sampled_from([lambda fake: fake, FakeHost.with_grub, FakeHost.with_systemd_boot])


@pytest.mark.behaviour("F-65", "F-73", "HP12")
@settings(max_examples=25, deadline=None)
@given(LOADERS, st.lists(st.tuples(PROFILES, st.integers(0, 40), st.booleans()), max_size=4))
def test_any_history_of_switches_crashes_and_boots_can_be_rolled_back(
    make: Callable[[FakeHost], FakeHost],
    history: list[tuple[dict[str, object], int, bool]],
) -> None:
    fake = make(a_host())
    before = fake.everything()
    for number, (parts, crash, boot) in enumerate(history):
        target = a_target(fake, f"p{number}", **parts)
        fake.points.at = fake.points.passed + crash if crash else None
        try:
            fake.apply(target)
        except Crash:
            fake.points.at = None
        fake.points.at = None
        if boot:
            staged = BootLine(fake.host(), fake.state.load().boot).staged
            fake.boot(staged.line if staged else fake.next_line())  # as kexec does
            fake.resume()
    fake.apply(Target())
    fake.power_cycle()
    fake.resume()
    assert fake.everything() == before
    assert fake.cmdline == ROOT_LINE
