"""Services of the host that a profile wants running or not running.

Services are started and stopped, never enabled or disabled: a boot starts the host's own choice,
then `resume` applies the profile. Twine's own services and those that a host cannot work without
are refused, also by an alias. The state of a service is read from systemd over D-Bus, which covers
aliases, instances of templates, generated units, other slices and oneshots without processes.
Source of the states: org.freedesktop.systemd1(5), and `ServiceState` of systemd 257.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import ApplyOutcome, Disruption, SettingChange, WantedSetting
from sidekick.setting import Applied, Host, Observed, Setting
from sidekick.settings.service_manager import BUS, FOLDERS, services_of
from wire.errors import FieldError, HostError, SystemdError, Unprocessable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.machine import ServiceUnit

Unit = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9:_.@\\-]{0,200}\.service\Z")]
RUNNING, STOPPED = "running", "stopped"
STARTING, RESTARTING, STOPPING = "starting", "restarting", "stopping"
UP = frozenset({RUNNING, STARTING, RESTARTING})
"""States in which systemd keeps a service up, even if it does not run at this moment."""
MAX_JOB_S = 100.0
"""The most that a start or a stop may take: systemd gives up after 90 s by default."""
SETTLE_S = 2.0
"""Seconds that a service must keep its new state: one that crashes has crashed by then."""
POLL_S = 0.05
REFUSED = re.compile(
    r"(twine-|sidekick|systemd-|dbus|ssh|getty@|serial-getty@|console-getty|container-getty@|"
    r"networking|NetworkManager|auditd|polkit|user@|init|dev-|rescue|emergency).*"
)


class Services(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [services] table."""

    running: list[Unit] = []
    stopped: list[Unit] = []
    required: bool = False
    """Whether a host without one of them cannot run the profile."""


class ServicesSetting(Setting):
    """One value for each service: running or stopped."""

    kind: ClassVar[str] = "services"
    section: ClassVar[type[Services]] = Services
    has_dependents: ClassVar[bool] = True

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each service that is refused, or both running and stopped."""
        table: Services = profile.sections[self.kind]
        errors = []
        for name in [*table.running, *table.stopped]:
            where = profile.source_of(f"services.{name}")
            reason = ""
            if REFUSED.fullmatch(name):
                reason = f"{name} may not be started or stopped by a profile ({where})"
            elif name.endswith("@.service"):
                reason = f"{name} is a template: name an instance of it ({where})"
            if reason:
                errors.append(FieldError(field="services", reason=reason))
        for name in sorted({*table.running} & {*table.stopped}):
            reason = f"{name} cannot both run and be stopped"
            errors.append(FieldError(field="services", reason=reason))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return one value for each service, by its own name.

        An alias is resolved first: two names of one service have one original.
        """
        table: Services = profile.sections[self.kind]
        wanted: dict[str, WantedSetting] = {}
        for value, names in ((STOPPED, table.stopped), (RUNNING, table.running)):
            for name in names:
                unit = services_of(host).load(name)
                own = unit.name if unit else name
                asked = self.value_of(profile, name, value, f"services.{own}")
                if REFUSED.fullmatch(own):
                    raise Unprocessable(
                        f"{name} is {own}, which may not be started or stopped by a "
                        f"profile ({asked.source})"
                    )
                if own in wanted and wanted[own].value != value:
                    raise Unprocessable(f"{own} cannot both run and be stopped ({asked.source})")
                wanted[own] = asked
        return list(wanted.values())

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return that a service of the host starts or ends."""
        return Disruption.RESTART

    def why_missing(self, setting: str) -> str:
        """Return why a host cannot have it."""
        return f"this host has no {_unit(setting)}"

    def read(self, host: Host, setting: str) -> str | None:
        """Return its state in systemd, None if it is not installed."""
        unit = services_of(host).load(_unit(setting))
        _read_repeatable_files(host, _unit(setting), unit)
        return state_of(unit) if unit else None

    def write(self, host: Host, setting: str, value: str) -> None:
        """Start or stop it, and wait until systemd has no job for it."""
        name, services = _unit(setting), services_of(host)
        (services.start if value in UP else services.stop)(name)
        until = host.monotonic() + MAX_JOB_S
        while (unit := services.load(name)) and unit.has_job:
            if host.monotonic() >= until:
                raise SystemdError(f"{name} is still {state_of(unit)} after {MAX_JOB_S:g} s")
            host.sleep(POLL_S)

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return the starts and stops, without services that already return to their original."""
        rest = {
            name: original
            for name, original in originals.items()
            if original is None or not _is_up_in_both(original, observed.get(name))
        }
        return super().plan(wanted, observed, rest)

    def apply(self, host: Host, change: SettingChange) -> Applied:
        """Start or stop a service, and check that it keeps its state."""
        self.write(host, change.setting, change.after)
        reason = "" if change.after not in (RUNNING, STOPPED) else _watch_new_state(host, change)
        actual = self.read(host, change.setting) or ""
        if not reason and _is_up_in_both(change.after, actual):
            return Applied(ApplyOutcome.APPLIED, actual)
        return Applied(ApplyOutcome.FAILED, actual, reason or f"it is {actual} instead")

    def undo(self, host: Host, change: SettingChange) -> None:
        """Restore whether systemd keeps it up; the state `failed` is reset."""
        if not _is_up_in_both(change.before, self.read(host, change.setting)):
            self.write(host, change.setting, change.before)
        if change.before == STOPPED:
            services_of(host).reset_failed(_unit(change.setting))
        actual = self.read(host, change.setting)
        if not _is_up_in_both(change.before, actual):
            raise HostError(f"{change.setting} was {change.before} before and is now {actual}")


def state_of(unit: ServiceUnit) -> str:
    """Return the state of a service, in one word."""
    if unit.active == "activating":
        return RESTARTING if unit.sub.startswith("auto-restart") else STARTING
    if unit.active == "deactivating":
        return STOPPING
    return STOPPED if unit.active in ("inactive", "failed") else RUNNING


def _watch_new_state(host: Host, change: SettingChange) -> str:
    """Watch a service after its change; return why it did not keep its state.

    A stopped service is only watched if something may start it at once.
    """
    services, name = services_of(host), _unit(change.setting)
    first = unit = services.load(name)
    until = host.monotonic() + SETTLE_S
    while unit and first and (change.after == RUNNING or unit.triggered):
        state = state_of(unit)
        if state != change.after and not (state == STOPPED and change.after == RUNNING):
            return f"it is {state} instead"
        if state == STOPPED and change.after == RUNNING:
            return _why_ended(unit)
        if unit.invocation_id != first.invocation_id:
            return "it ended and was restarted at once"
        if host.monotonic() >= until:
            break
        host.sleep(POLL_S)
        unit = services.load(name)
    return ""


def _why_ended(unit: ServiceUnit) -> str:
    if unit.result != "success":
        return f"it started and failed ({unit.result})"
    oneshot = " (a oneshot without RemainAfterExit=)" if unit.kind == "oneshot" else ""
    return f"it started and has ended{oneshot}"


def _read_repeatable_files(host: Host, name: str, unit: ServiceUnit | None) -> None:
    """Read files that `look.py` can read again: the cgroup of the service, or that it is not
    installed.

    A oneshot may run and end between two checks, so its state must be read from systemd.
    """
    if unit is None:
        for folder in FOLDERS:
            host.fs.exists(f"{folder}/{name}")
    elif unit.kind != "oneshot" and unit.active in ("active", "inactive", "failed"):
        host.fs.find(f"/sys/fs/cgroup{unit.control_group}/cgroup.events")
    else:
        host.fs.path(BUS)


def _is_up_in_both(state: str | None, other: str | None) -> bool:
    """Return whether systemd keeps the service up in both states, or down in both."""
    return state is not None and other is not None and (state in UP) is (other in UP)


def _unit(setting: str) -> str:
    return setting.removeprefix("services.")
