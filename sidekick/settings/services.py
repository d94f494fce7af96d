"""Services of the host that a profile wants running or not running.

Started and stopped, never enabled or disabled: the host's own choice holds again at the next boot,
before `resume` brings the profile back. Twine's own services and those without which a host is lost
are refused. Whether one runs is read from its cgroup, which a recorded tree has too.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import Disruption, Wanted
from sidekick.setting import Host, Setting
from wire.errors import FieldError

Unit = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9:_.-]{0,200}\.service\Z")]
SYSTEMCTL = "/usr/bin/systemctl"
FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system")
RUNNING, STOPPED = "running", "stopped"
REFUSED = re.compile(
    r"(twine-|sidekick|systemd-|dbus|ssh|getty@|serial-getty@|networking|NetworkManager|auditd|"
    r"polkit|user@|init|dev-|rescue|emergency).*"
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
    carries_others: ClassVar[bool] = True

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the services that are not for a profile, or that it wants both ways."""
        found: Services | None = profile.section(self.kind)
        errors = []
        for name in [*found.running, *found.stopped] if found else ():
            where = profile.source_of(f"services.{name}")
            if REFUSED.fullmatch(name):
                reason = f"{name} is not a profile's to start or stop ({where})"
                errors.append(FieldError(field="services", reason=reason))
        for name in sorted({*found.running} & {*found.stopped}) if found else ():
            reason = f"{name} cannot both run and be stopped"
            errors.append(FieldError(field="services", reason=reason))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:  # noqa: ARG002
        """Return one value for each service."""
        found: Services | None = profile.section(self.kind)
        if found is None:
            return []
        return [
            Wanted(
                setting=f"services.{name}",
                value=value,
                required=found.required,
                source=profile.source_of(f"services.{name}"),
            )
            for value, names in ((STOPPED, found.stopped), (RUNNING, found.running))
            for name in names
        ]

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return that a service of the host starts or ends."""
        return Disruption.RESTART

    def lacking(self, setting: str) -> str:
        """Return why a host cannot have it."""
        return f"this host has no {setting.removeprefix('services.')}"

    def read(self, host: Host, setting: str) -> str | None:
        """Return whether it has processes, None where it is not installed."""
        unit = setting.removeprefix("services.")
        if not any(host.fs.exists(f"{folder}/{unit}") for folder in FOLDERS):
            return None
        events = host.fs.find(f"/sys/fs/cgroup/system.slice/{unit}/cgroup.events") or ""
        return RUNNING if "populated 1" in events else STOPPED

    def write(self, host: Host, setting: str, value: str) -> None:
        """Start or stop it, and wait until systemd says that it has done so."""
        verb = "start" if value == RUNNING else "stop"
        host.processes.run([SYSTEMCTL, verb, setting.removeprefix("services.")])
