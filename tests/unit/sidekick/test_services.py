"""Services as systemd has them: aliases, templates, slices, oneshots, and crashing services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_host import FakeHost
from msgspec.structs import replace

from agent.machine import ServiceUnit
from sidekick.profile import Profile
from sidekick.read_recorder import with_recorder
from sidekick.report import ApplyOutcome, SettingChange
from sidekick.setting import Host
from sidekick.settings.service_manager import BUS, RecordedServices
from sidekick.settings.services import Services, ServicesSetting, state_of
from wire.errors import SystemdError, Unprocessable

SETTING = ServicesSetting()


@dataclass
class Manager:
    """systemd with a few services; each start and stop takes one look to finish."""

    units: dict[str, ServiceUnit]
    aliases: dict[str, str] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    then: dict[str, list[ServiceUnit]] = field(default_factory=dict)
    """The later states of a service after its start, one for each look."""
    following: list[ServiceUnit] = field(default_factory=list)
    starts: int = 0

    def load(self, unit: str) -> ServiceUnit | None:
        name = self.aliases.get(unit, unit)
        if self.following:
            self.units[name] = self.following.pop(0)
        found = self.units.get(name)
        if found and found.has_job:
            self.units[name] = replace(found, has_job=False)
        return found

    def start(self, unit: str) -> None:
        self.jobs.append(f"start {unit}")
        self.starts += 1
        up = replace(self.units[unit], active="active", sub="running", has_job=True)
        self.units[unit] = replace(up, invocation_id=f"{self.starts}")
        self.following = list(self.then.get(unit, ()))

    def stop(self, unit: str) -> None:
        self.jobs.append(f"stop {unit}")
        self.units[unit] = replace(self.units[unit], active="inactive", sub="dead", has_job=True)

    def reset_failed(self, unit: str) -> None:
        if self.units[unit].active == "failed":
            self.units[unit] = replace(self.units[unit], active="inactive", sub="dead")


def a_unit(
    name: str = "a.service", active: str = "active", sub: str = "", **more: object
) -> ServiceUnit:
    sub = sub or {"active": "running", "failed": "failed"}.get(active, "dead")
    return ServiceUnit(name=name, active=active, sub=sub, **more)  # type: ignore[arg-type]


def a_host(fake: FakeHost, *units: ServiceUnit, **more: object) -> tuple[Host, Manager]:
    manager = Manager({unit.name: unit for unit in units}, **more)  # type: ignore[arg-type]
    return replace(fake.host(), services=manager), manager


def profile_of(**lists: list[str]) -> Profile:
    return Profile(name="p", sections={"services": Services(**lists)})


def a_change(before: str, after: str, name: str = "a.service") -> SettingChange:
    return SettingChange(setting=f"services.{name}", before=before, after=after)


@pytest.mark.behaviour("BUG-SK31")
@pytest.mark.parametrize(
    ("active", "sub", "state"),
    [
        ("active", "running", "running"),
        ("active", "exited", "running"),
        ("reloading", "reload", "running"),
        ("activating", "start-pre", "starting"),
        ("activating", "auto-restart", "restarting"),
        ("activating", "auto-restart-queued", "restarting"),
        ("deactivating", "stop-sigterm", "stopping"),
        ("inactive", "dead", "stopped"),
        ("failed", "failed", "stopped"),
    ],
)
def test_a_state_has_the_name_that_systemd_uses(
    fake: FakeHost, active: str, sub: str, state: str
) -> None:
    """An active oneshot counts as running, with any cgroup content, in any slice."""
    unit = a_unit(active=active, sub=sub, kind="oneshot", control_group="/other.slice/a.service")
    host, _ = a_host(fake, unit)
    assert SETTING.read(host, "services.a.service") == state == state_of(unit)


@pytest.mark.behaviour("BUG-SK31")
def test_a_service_without_a_file_in_the_three_folders_exists(fake: FakeHost) -> None:
    """Only systemd knows a generated unit, or one below /usr/local."""
    host, manager = a_host(fake, a_unit("made@1.service"))
    assert SETTING.check(profile_of(stopped=["made@1.service"])) == []
    (wanted,) = SETTING.wanted(profile_of(stopped=["made@1.service"]), host)
    observed = SETTING.observe(host, [wanted.setting])
    (change,) = SETTING.plan([wanted], observed, {})
    assert SETTING.apply(host, change).outcome is ApplyOutcome.APPLIED
    assert manager.jobs == ["stop made@1.service"]
    assert SETTING.read(host, "services.no.service") is None


@pytest.mark.behaviour("BUG-SK31")
def test_an_alias_is_the_service_that_it_names(fake: FakeHost) -> None:
    """Two names of one service have one original, and cannot contradict each other."""
    host, _ = a_host(
        fake,
        a_unit(),
        a_unit("ssh.service"),
        aliases={"b.service": "a.service", "s.service": "ssh.service"},
    )
    found = SETTING.wanted(profile_of(stopped=["b.service"]), host)
    assert [w.setting for w in found] == ["services.a.service"]
    with pytest.raises(Unprocessable, match="cannot both run and be stopped"):
        SETTING.wanted(profile_of(stopped=["b.service"], running=["a.service"]), host)
    with pytest.raises(
        Unprocessable,
        match=r"s.service is ssh.service, which may not be started or stopped by a profile",
    ):
        SETTING.wanted(profile_of(stopped=["s.service"]), host)


def test_a_template_is_not_a_service() -> None:
    (error,) = SETTING.check(profile_of(running=["x@.service"]))
    assert "name an instance of it" in error.reason


@pytest.mark.behaviour("BUG-SK31")
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (
            [a_unit(), a_unit("a.service", "failed", result="exit-code")],
            "started and failed (exit-code)",
        ),
        ([a_unit(), a_unit(active="activating", sub="auto-restart")], "it is restarting instead"),
        (
            [a_unit(invocation_id="1"), a_unit(invocation_id="1"), a_unit(invocation_id="2")],
            "restarted at once",
        ),
        ([a_unit(), a_unit(active="inactive", kind="oneshot")], "without RemainAfterExit="),
    ],
)
def test_a_service_that_crashes_at_once_is_not_applied(
    fake: FakeHost, then: list[ServiceUnit], reason: str
) -> None:
    """The service must still run after a settle time, from the same start."""
    host, manager = a_host(fake, a_unit(active="inactive"), then={"a.service": then})
    made = SETTING.apply(host, a_change("stopped", "running"))
    assert made.outcome is ApplyOutcome.FAILED
    assert reason in made.detail
    manager.then.clear()
    SETTING.undo(host, a_change("stopped", "running"))
    assert SETTING.read(host, "services.a.service") == "stopped"
    assert manager.units["a.service"].active == "inactive"


def test_a_service_that_stays_up_is_applied_after_its_settle_time(fake: FakeHost) -> None:
    host, _ = a_host(fake, a_unit(active="inactive"))
    before = fake.time_s
    assert SETTING.apply(host, a_change("stopped", "running")).outcome is ApplyOutcome.APPLIED
    assert fake.time_s - before >= 2.0


def test_a_stopped_service_is_watched_only_where_something_starts_it(fake: FakeHost) -> None:
    for triggered in (False, True):
        host, _ = a_host(fake, a_unit(triggered=triggered))
        before = fake.time_s
        assert SETTING.apply(host, a_change("running", "stopped")).outcome is ApplyOutcome.APPLIED
        assert (fake.time_s - before >= 2.0) is triggered


def test_a_stop_that_does_not_end_is_an_error(fake: FakeHost) -> None:
    host, manager = a_host(fake, a_unit())
    stuck = a_unit(active="deactivating", sub="stop-sigterm", has_job=True)
    manager.load = lambda unit: stuck  # type: ignore[method-assign]
    with pytest.raises(SystemdError, match="still stopping after 100 s"):
        SETTING.write(host, "services.a.service", "stopped")


def test_a_restarting_service_is_restored_without_a_settle_time(fake: FakeHost) -> None:
    """The service crashed before the profile was applied, and may crash after it."""
    host, manager = a_host(fake, a_unit(active="activating", sub="auto-restart"))
    original = SETTING.observe(host, ["services.a.service"])
    SETTING.apply(host, a_change("restarting", "stopped"))
    (back,) = SETTING.plan([], SETTING.observe(host, original), original)
    manager.then["a.service"] = [a_unit(), a_unit(active="activating", sub="auto-restart")]
    assert SETTING.apply(host, back).outcome is ApplyOutcome.APPLIED
    assert SETTING.plan([], SETTING.observe(host, original), original) == []


@pytest.mark.parametrize(("kind", "again"), [("simple", True), ("oneshot", False)])
def test_a_check_reads_the_state_of_a_service_again(fake: FakeHost, kind: str, again: bool) -> None:
    host, _ = a_host(fake, a_unit(kind=kind, control_group="/x.slice/a.service"))
    host, kept = with_recorder(host)
    SETTING.read(host, "services.a.service")
    assert (kept.unrecorded == []) is again
    assert again is (kept.unrecorded != [BUS])
    assert len(kept.reads) == int(again)


@pytest.fixture
def tree(fake: FakeHost) -> Callable[[str, str], RecordedServices]:
    def build(path: str, group: str) -> RecordedServices:
        fake.put(path, "[Service]")
        fake.put(f"/sys/fs/cgroup{group}/cgroup.events", "populated 1\nfrozen 0")
        return RecordedServices(fake.fs)

    return build


@pytest.mark.behaviour("BUG-SK31")
def test_a_recorded_tree_has_all_folders_and_slices(
    fake: FakeHost, tree: Callable[[str, str], RecordedServices]
) -> None:
    """/usr/local, generators, templates and other slices count in the tree as well."""
    found = tree("/usr/local/lib/systemd/system/a.service", "/b.slice/b-c.slice/a.service").load(
        "a.service"
    )
    assert found is not None
    assert (found.active, found.control_group) == ("active", "/b.slice/b-c.slice/a.service")
    tree("/run/systemd/generator/x@.service", "/system.slice/system-x.slice/x@1.service")
    instance = RecordedServices(fake.fs).load("x@1.service")
    assert instance is not None
    assert instance.active == "active"
    folder = fake.fs.path("/usr/local/lib/systemd/system")
    Path(folder, "alias.service").symlink_to("a.service")
    alias = RecordedServices(fake.fs).load("alias.service")
    assert alias is not None
    assert alias.name == "a.service"
    assert RecordedServices(fake.fs, has_systemd=False).load("a.service") is None
