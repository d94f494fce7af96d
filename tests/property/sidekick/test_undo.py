"""Whatever is applied can be undone, to the last bit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_host import SYSCTLS, Crash, FakeHost, a_profile, a_target
from hypothesis import given, settings
from hypothesis import strategies as st

from sidekick import apply as runs
from sidekick.plan import make_plan
from sidekick.profile import Hugepages
from sidekick.report import Change, Wanted
from sidekick.settings import all_settings
from sidekick.settings.hugepages import HugepagesSetting
from sidekick.settings.kernel import ALLOWED, CMDLINE, STAGED, KernelSetting, key_of, merge, split
from sidekick.settings.sysctl import SysctlSetting
from sidekick.state import OwnedArgument, Target

ACTIONS = {"vm.drop_caches", "vm.compact_memory"}
TWINS = {"vm.dirty_ratio", "vm.dirty_background_ratio"}
NAMES = st.sampled_from(sorted(SYSCTLS.keys() - ACTIONS))
NUMBERS = st.integers(1, 200)
SYSCTL = st.dictionaries(
    NAMES.filter(lambda n: n not in TWINS), NUMBERS, max_size=6
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
        ["root=/dev/vda1", "ro", "quiet", "preempt=a", "nosmt=d", 'x="y  z"', "iso-l=1"]
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
    values = [Wanted(setting=f"sysctl.{k}", value=str(v)) for k, v in wanted.items()]
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
    change = Change(setting="hugepages.2m.node1", before=str(before), after=str(after))
    setting.undo(fake.host(), change)
    fake.fs.free_pages["node1"] = free
    setting.apply(fake.host(), change)
    if fake.pages(1) >= before or free >= before:
        setting.undo(fake.host(), change)
        assert fake.pages(1) == before


@settings(max_examples=30, deadline=None)
@given(FOREIGN, ARGUMENTS, st.none() | st.just("root=/dev/vda1 own"))
def test_undoing_a_staged_line_brings_the_file_back(
    line: str, arguments: list[str], staged: str | None
) -> None:
    fake = a_host()
    fake.boot(line)
    if staged:
        fake.put("/etc/kernel/cmdline", staged)
    setting = KernelSetting(merge(line, (), arguments)[1])
    observed = setting.observe(fake.host(), ())
    wanted = [Wanted(setting=CMDLINE, value=" ".join(arguments))] if arguments else []
    for change in setting.plan(wanted, observed, {STAGED: observed[STAGED]}):
        setting.apply(fake.host(), change)
        setting.undo(fake.host(), change)
    assert setting.observe(fake.host(), ()) == observed


@given(FOREIGN, st.lists(ARGUMENTS, max_size=4))
def test_the_host_gets_its_command_line_back(before: str, profiles: list[list[str]]) -> None:
    line: str = before
    owned: tuple[OwnedArgument, ...] = ()
    for arguments in profiles:
        line, ours = merge(line, owned, arguments)
        assert merge(line, ours, arguments) == (line, ours)
        last = {key_of(a): a for a in split(line)}
        assert all(last[key_of(a)] == a for a in arguments)
        owned = ours
    assert sorted(split(merge(line, owned, [])[0])) == sorted(split(before))


@given(st.text(max_size=40), st.text(max_size=40))
def test_only_harmless_arguments_pass(key: str, value: str) -> None:  # F-68
    for argument in (f"{key}={value}", f"nosmt={value}", f"nosmt {value}", f"{key}"):
        if not KernelSetting().check(a_profile(cmdline=(argument,))):
            name = argument.partition("=")[0]
            assert name in ALLOWED
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
    first, _ = runs.plan(fake.host(), fake.state, target)
    assert runs.plan(fake.host(), fake.state, target)[0] == first
    assert fake.state.load() == record
    runs.apply(fake.host(), fake.state, target)
    again, _ = runs.plan(fake.host(), fake.state, target)
    assert all(c.setting == CMDLINE and c.before == c.after for c in again.changes)
    assert make_plan(all_settings(()), [], {}, {}).changes == ()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(PROFILES, st.integers(0, 40), st.booleans()), max_size=4))
def test_any_history_of_switches_crashes_and_boots_can_be_rolled_back(
    history: list[tuple[dict[str, object], int, bool]],
) -> None:  # F-65 F-73 HP12
    fake = a_host()
    before = fake.everything()
    for number, (parts, crash, boot) in enumerate(history):
        target = a_target(fake, f"p{number}", **parts)
        fake.points.at = fake.points.passed + crash if crash else None
        try:
            runs.apply(fake.host(), fake.state, target)
        except Crash:
            fake.points.at = None
        fake.points.at = None
        if boot:
            fake.boot(fake.fs.find("/etc/kernel/cmdline"))
            runs.resume(fake.host(), fake.state)
    runs.apply(fake.host(), fake.state, Target())
    fake.boot(merge(fake.cmdline, fake.state.load().owned, ())[0])
    runs.resume(fake.host(), fake.state)
    assert fake.everything() == before
    assert sorted(split(fake.cmdline)) == sorted(split("root=/dev/vda1 ro quiet"))
