"""A new kind of setting needs only its own module and one line of the registry."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from fake_host import FakeHost, a_profile

import sidekick
from sidekick import settings
from sidekick.profile import Profile
from sidekick.record import Target
from sidekick.report import ApplyOutcome, ProfileState, WantedSetting
from sidekick.setting import Contribution, Host, Setting
from sidekick.settings import SETTINGS
from sidekick.targets import target_of
from wire.errors import ConfigError

FOLDER = Path(sidekick.__file__).parent
ENGINE = [
    "apply",
    "boot",
    "observe",
    "plan",
    "reboot",
    "setting",
    "status",
    "targets",
    "unattended",
    "write_order",
]
KNOB = "/sys/class/thing/knob"


@pytest.mark.behaviour("BUG-SK5")
def test_the_engine_names_no_kind_of_setting() -> None:
    kinds = set(SETTINGS)
    paths = [FOLDER / f"{name}.py" for name in ENGINE] + list((FOLDER / "loaders").glob("*.py"))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.partition(".")[0] not in kinds, f"{path.name}: {node.value}"
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("sidekick.settings."), path.name


class Thing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section."""

    knob: str | None = None
    isolated: str | None = None


class ThingSetting(Setting):
    """A kind that the engine does not know: a file, a service to restart, an argument."""

    kind = "thing"
    section: ClassVar[type] = Thing

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        section = profile.section(self.kind) or Thing()
        values = {"thing.knob": section.knob, "thing.isolated": section.isolated}
        return [WantedSetting(setting=name, value=value) for name, value in values.items() if value]

    def boot(self, wanted: object, own: str) -> list[Contribution]:
        return [
            Contribution(
                settings=(w.setting,), group="isolcpus", arguments=(f"isolcpus={w.value}",)
            )
            for w in wanted  # type: ignore[attr-defined]
            if w.setting == "thing.isolated"
        ]

    def restarts(self, setting: str) -> tuple[str, ...]:
        return ("thing.service",)

    def touches(self, setting: str) -> tuple[str, ...]:
        return (KNOB,) if setting == "thing.knob" else (setting,)

    def read(self, host: Host, setting: str) -> str | None:
        if setting == "thing.isolated":
            return host.fs.find("/sys/devices/system/cpu/isolated")
        return host.fs.find(KNOB)

    def write(self, host: Host, setting: str, value: str) -> None:
        host.fs.write(KNOB, value)


@pytest.fixture
def thing(fake: FakeHost, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """A host that has the thing, and a sidekick that has its kind of setting."""
    monkeypatch.setattr(settings, "SETTINGS", {**SETTINGS, "thing": ThingSetting()})
    fake.put(KNOB, "slow")
    return fake


def a_thing(fake: FakeHost, name: str = "web", **section: str) -> Target:
    return target_of(a_profile(name, thing=Thing(**section)), fake.host())


@pytest.mark.behaviour("BUG-SK5")
def test_a_new_kind_is_applied_verified_and_undone(thing: FakeHost) -> None:
    report = thing.apply(a_thing(thing, knob="fast"))
    assert report.state is ProfileState.VERIFIED
    assert (thing.fs.read(KNOB), thing.processes.ran) == (
        "fast",
        [["systemctl", "try-restart", "thing.service"]],
    )
    thing.apply(Target())
    assert thing.fs.read(KNOB) == "slow"


@pytest.mark.behaviour("F-64")
def test_a_kernel_that_keeps_its_own_value_fails_the_run(thing: FakeHost) -> None:
    thing.fs.rounds[KNOB] = lambda value: "medium"
    report = thing.apply(a_thing(thing, knob="fast"))
    assert report.rolled_back is False, "medium is neither slow nor fast"
    assert [s.outcome for s in report.settings] == [ApplyOutcome.FAILED]
    assert "keeps 'medium'" in report.detail


def test_a_run_is_undone_if_a_service_does_not_restart(thing: FakeHost) -> None:
    thing.processes.fails["systemctl"] = "Job failed"
    report = thing.apply(a_thing(thing, knob="fast"))
    assert thing.fs.read(KNOB) == "slow"
    assert "Job failed" in report.detail


@pytest.mark.behaviour("F-65")
def test_a_service_is_restarted_even_if_the_run_before_was_killed(thing: FakeHost) -> None:
    from fake_host import Crash

    class Killed(Crash):
        pass

    def kill(*args: object, **options: object) -> None:
        raise Killed

    run, thing.processes.run = thing.processes.run, kill  # type: ignore[assignment,method-assign]
    with pytest.raises(Killed):
        thing.apply(a_thing(thing, knob="fast"))
    thing.processes.run = run  # type: ignore[method-assign]
    assert thing.fs.read(KNOB) == "fast", "nothing is left to write"
    assert thing.apply(a_thing(thing, knob="fast")).state is ProfileState.VERIFIED
    assert thing.processes.ran == [["systemctl", "try-restart", "thing.service"]]


def test_two_kinds_that_set_one_file_are_reported_before_any_write(
    thing: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThingSetting, "touches", lambda *_: ("/proc/sys/vm/swappiness",))
    profile = a_profile("web", thing=Thing(knob="fast"), sysctl={"vm.swappiness": 1})
    with pytest.raises(ConfigError) as caught:
        target_of(profile, thing.host())
    assert "which sysctl.vm.swappiness also sets" in caught.value.errors[0].reason
