"""Which service manager a host has: systemd over D-Bus, or the files of a recorded tree."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from agent.machine import ServiceControl, ServiceUnit
from wire.errors import SystemdError

if TYPE_CHECKING:
    from agent.machine.kernelfs import KernelFs
    from sidekick.setting import Host

BUS = "/run/dbus/system_bus_socket"
BOOTED = "/run/systemd/system"
"""Exists if and only if systemd is the service manager (sd_booted(3))."""
GROUPS = "/sys/fs/cgroup"
FOLDERS = (
    "/etc/systemd/system",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)
"""Where systemd finds units (systemd.unit(5))."""


def services_of(host: Host) -> ServiceControl:
    """Return the service manager of a host."""
    if host.services is not None:
        return host.services
    if host.fs.root == Path("/"):
        return (
            _systemd() if host.fs.exists(BOOTED) else RecordedServices(host.fs, has_systemd=False)
        )
    return RecordedServices(host.fs)


@cache
def _systemd() -> ServiceControl:
    from agent.machine.host_services import HostServices  # loads libsystemd

    return HostServices()


class RecordedServices:
    """Services of a recorded tree: installed if there is a unit file, running if a cgroup has
    processes. Nothing can be started there.
    """

    def __init__(self, fs: KernelFs, *, has_systemd: bool = True) -> None:
        """A host without systemd has no services."""
        self._fs, self._has_systemd = fs, has_systemd

    def load(self, unit: str) -> ServiceUnit | None:
        """Return a service, None where the tree has no file of that name."""
        name = self._unit_name(unit) if self._has_systemd else None
        if name is None:
            return None
        group = self._group_of(name)
        events = self._fs.find(f"{GROUPS}{group}/cgroup.events") or ""
        active, sub = ("active", "running") if "populated 1" in events else ("inactive", "dead")
        return ServiceUnit(name=name, active=active, sub=sub, control_group=group)

    def start(self, unit: str) -> None:
        """Refuse."""
        raise SystemdError(f"cannot start {unit}: systemd does not run on this host")

    def stop(self, unit: str) -> None:
        """Refuse."""
        raise SystemdError(f"cannot stop {unit}: systemd does not run on this host")

    def reset_failed(self, unit: str) -> None:
        """Do nothing: no service of a tree has failed."""

    def _unit_name(self, unit: str) -> str | None:
        prefix, at, _ = unit.partition("@")
        template = f"{prefix}@.service" if at else unit
        for folder in FOLDERS:
            if self._fs.exists(f"{folder}/{unit}"):
                place = Path(f"{self._fs.root}/{folder}/{unit}")
                target = place.readlink().name if place.is_symlink() else unit
                alias = target.endswith(".service") and "@" not in target
                return target if alias else unit
            if self._fs.exists(f"{folder}/{template}"):
                return unit
        return None

    def _group_of(self, unit: str) -> str:
        """Return the cgroup of a service in whichever slice it runs; else where it would be."""
        pending = [""]
        while pending:
            group = pending.pop()
            for name in self._fs.names(f"{GROUPS}{group}"):
                if name == unit:
                    return f"{group}/{name}"
                if name.endswith(".slice"):
                    pending.append(f"{group}/{name}")
        return f"/system.slice/{unit}"
