"""Kernel modules that a profile needs loaded.

A profile can only load modules: a module that the host itself loaded has a user, and is not
unloaded. Modules that a profile loaded are unloaded when another profile is applied; a module that
is in use then is reported as a failure.
Source: Linux, Documentation/ABI/stable/sysfs-module; modprobe(8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import Host, Setting
from wire.errors import FieldError

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,55}\Z")]
MODPROBE = "/sbin/modprobe"
LOADED, ABSENT = "loaded", "absent"

REFUSED = frozenset({"netconsole", "nf_conntrack", "pktgen", "scsi_debug"})
"""Modules that a profile may not load: they send the host's log elsewhere, limit every later
connection of the host, send packets, or make disks."""


class Modules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [modules] table."""

    load: list[Name] = []
    required: bool = False
    """Whether a kernel without one of them cannot run the profile."""


class ModulesSetting(Setting):
    """One value for each module: loaded or absent."""

    kind: ClassVar[str] = "modules"
    section: ClassVar[type[Modules]] = Modules
    has_dependents: ClassVar[bool] = True
    adds_settings: ClassVar[bool] = True
    is_restored_by_boot: ClassVar[bool] = True

    def merge(self, parent: dict[str, object], child: dict[str, object]) -> dict[str, object]:
        """Return the modules of both."""
        both = [*_as_list(parent.get("load")), *_as_list(child.get("load"))]
        return {**parent, **child, "load": list(dict.fromkeys(both))}

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the modules that a profile may not load."""
        table: Modules = profile.sections[self.kind]
        return [
            FieldError(
                field="modules.load",
                reason=f"{name} may not be set by a profile "
                f"({profile.source_of(f'modules.{name}')})",
            )
            for name in table.load
            if name in REFUSED
        ]

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return one value for each module."""
        table: Modules = profile.sections[self.kind]
        return [self.value_of(profile, name, LOADED) for name in table.load]

    def why_missing(self, setting: str) -> str:
        """Return why a host cannot have it."""
        return f"this kernel has no module {setting.removeprefix('modules.')}"

    def read(self, host: Host, setting: str) -> str | None:
        """Return whether it is built in or loaded; None if there is no such module."""
        return self.observe(host, [setting])[setting]

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the values of many modules; the lists of the kernel's modules are read once."""
        names = {setting: setting.removeprefix("modules.") for setting in settings}
        names = {setting: name for setting, name in names.items() if self.owns(setting)}
        observed: dict[str, str | None] = dict.fromkeys(names)
        loaded = {s for s, name in names.items() if host.fs.exists(f"/sys/module/{name}")}
        if loaded != observed.keys():
            builtin = _modules_in(
                host.fs.find(f"/lib/modules/{host.hardware.kernel}/modules.builtin")
            )
            loaded |= {setting for setting, name in names.items() if name in builtin}
        if loaded != observed.keys():
            installed = installed_modules(host)
            observed |= {setting: ABSENT for setting, name in names.items() if name in installed}
        return observed | dict.fromkeys(loaded, LOADED)

    def write(self, host: Host, setting: str, value: str) -> None:
        """Load it, or unload what an earlier profile had loaded."""
        name = setting.removeprefix("modules.")
        host.processes.run([MODPROBE, name] if value == LOADED else [MODPROBE, "-r", name])


def installed_modules(host: Host) -> set[str]:
    """Return the modules that the running kernel could load, as /sys spells them."""
    return _modules_in(host.fs.find(f"/lib/modules/{host.hardware.kernel}/modules.dep"))


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _modules_in(listing: str | None) -> set[str]:
    """Return the modules that a file of depmod(8) names by path, as /sys spells them."""
    paths = (line.partition(":")[0].strip() for line in (listing or "").splitlines())
    files = (path.rpartition("/")[2].partition(".")[0] for path in paths)
    return {file.replace("-", "_") for file in files}
