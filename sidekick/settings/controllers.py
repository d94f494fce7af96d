"""cgroup v2 controllers that are switched off below the slice of all tasks.

For services that have a machine to themselves the CPU controller has a cost and no benefit (paper,
§5.3). `DisableControllers=` keeps systemd from enabling it for children; this needs no boot, unlike
`cgroup_disable=`. Controllers that limit tasks must stay: memory and pids. A controller counts as
off if the kernel's `cgroup.subtree_control` lacks it. Source: systemd.resource-control(5); Linux,
Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from sidekick.profile import Profile
from sidekick.report import Disruption, WantedSetting
from sidekick.setting import Host, Setting

SLICE = "workload.slice"
DROP_IN = f"/run/systemd/system/{SLICE}.d/50-twine-controllers.conf"
"""In /run: a boot ends it, and `resume` brings it back with the profile."""
SYSTEMCTL = "/usr/bin/systemctl"
NONE = "none"
_HEAD = "[Slice]\nDisableControllers="


class CgroupControllers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [controllers] table."""

    disable: list[Literal["cpu", "cpuset", "io"]] = []
    """Not memory or pids: tasks would lose their limits."""
    required: bool = False
    """Whether a host without one of them cannot run the profile."""


class ControllersSetting(Setting):
    """The controllers that are off: `cpu io`, or `none`."""

    kind: ClassVar[str] = "controllers"
    section: ClassVar[type[CgroupControllers]] = CgroupControllers

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return the list."""
        table: CgroupControllers = profile.sections[self.kind]
        value = " ".join(sorted(set(table.disable))) or NONE
        return [self.value_of(profile, "disable", value, "controllers.disabled")]

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return DRAIN: the CPU shares of all running tasks would change at once."""
        return Disruption.DRAIN

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host cannot have it."""
        return f"there is no {SLICE} in cgroup v2: the agent does not run here"

    def read(self, host: Host, setting: str) -> str | None:  # noqa: ARG002
        """Return the controllers that are disabled in systemd and off in the kernel."""
        enabled = host.fs.find(f"/sys/fs/cgroup/{SLICE}/cgroup.subtree_control")
        if enabled is None:
            return None
        disabled = _disabled_by_drop_in(host)
        return " ".join(c for c in disabled if c not in enabled.split()) or NONE

    def write(self, host: Host, setting: str, value: str) -> None:  # noqa: ARG002
        """Set it for systemd, then in the kernel: systemd would wait for the next task start."""
        path = host.fs.path(DROP_IN)
        if value == NONE:
            host.disk.remove(path)
        else:
            host.disk.write(path, f"{_HEAD}{value}\n")
        host.processes.run([SYSTEMCTL, "daemon-reload"])
        control = f"/sys/fs/cgroup/{SLICE}/cgroup.subtree_control"
        enabled = host.fs.read(control).split()
        for controller in () if value == NONE else value.split():
            if controller in enabled:
                host.fs.write(control, f"-{controller}")


def _disabled_by_drop_in(host: Host) -> list[str]:
    found = (host.fs.find(DROP_IN) or "").partition("DisableControllers=")[2]
    return sorted(found.split())
