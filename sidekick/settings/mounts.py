"""Options of mounted file systems: times of access, lazy times, commits.

Only options that can be changed and restored while mounted. Options that risk data are left to the
owner of the mount. `atime` belongs to one mount. `lazytime` and `commit` belong to the file system,
so a profile sets them at its first mount: a bind mount cannot change its source.
Source: mount(8), "Filesystem-independent mount options"; Linux, Documentation/admin-guide/ext4.rst
and btrfs(5) for `commit`, whose 0 stands for the default and which is then not shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import Host, Setting
from wire.errors import FieldError, KernelFileError

if TYPE_CHECKING:
    from agent.machine.mounts import Mount, Mounts

DEFAULT = "default"
WITH_COMMIT = frozenset({"ext4", "btrfs"})
"""File systems that have the option `commit`."""
_POINT = re.compile(r"/[A-Za-z0-9_./-]{0,200}\Z")


class MountOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one mount point."""

    atime: Literal["noatime", "relatime", "strictatime"] | None = None
    """Whether reading a file writes its time of access."""
    lazytime: Literal["on", "off"] | None = None
    """Whether times stay in memory until the inode is written for another reason."""
    commit: Annotated[int, Meta(ge=1, le=300)] | None = None
    """Seconds after which the file system writes changes to the disk."""
    required: bool = False
    """Whether a host without that mount or option cannot run the profile."""


class MountsSetting(Setting):
    """One value for each mount point and option: `mounts.atime:/var/lib/twine`."""

    kind: ClassVar[str] = "mounts"
    section: ClassVar[Any] = dict[str, MountOptions]

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each key that is not a mount point."""
        table: dict[str, MountOptions] = profile.sections[self.kind]
        return [
            FieldError(field=f"mounts.{point}", reason="must be an absolute path")
            for point in table
            if not _POINT.fullmatch(point) or ".." in point.split("/")
        ]

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return one value for each option that is given."""
        table: dict[str, MountOptions] = profile.sections[self.kind]
        return [
            WantedSetting(
                setting=f"mounts.{key}:{point}",
                value=str(value),
                required=options.required,
                source=profile.source_of(f"mounts.{point}"),
            )
            for point, options in table.items()
            for key, value in msgspec.structs.asdict(options).items()
            if key != "required" and value is not None
        ]

    def why_missing(self, setting: str) -> str:
        """Return why a host has none."""
        key, point = _option_and_point(setting)
        if key == "atime":
            return f"nothing is mounted at {point}"
        return (
            f"nothing is mounted at {point}, its file system has no {key} to set, or "
            f"another mount of that file system comes first: name {key} there"
        )

    def read(self, host: Host, setting: str) -> str | None:
        """Return the option in force; of several mounts at one point the last one counts."""
        key, point = _option_and_point(setting)
        found = _find_mount(host, key, point)
        if found is None:
            return None
        if key == "atime":
            return next((o for o in ("noatime", "relatime") if o in found.options), "strictatime")
        if key == "lazytime":
            return "on" if "lazytime" in found.of_file_system else "off"
        if found.kind not in WITH_COMMIT:
            return None
        return next((o[7:] for o in found.of_file_system if o.startswith("commit=")), DEFAULT)

    def write(self, host: Host, setting: str, value: str) -> None:
        """Change that one option of that one mount, or of its file system."""
        key, point = _option_and_point(setting)
        found, mounts = _find_mount(host, key, point), _mount_control(host)
        if found is None:
            raise KernelFileError(f"cannot set {setting}: {self.why_missing(setting)}")
        if key == "atime":
            mounts.set_atime(found, value)
        elif key == "lazytime":
            mounts.set_option(found, "lazytime" if value == "on" else "nolazytime", None)
        else:
            mounts.set_option(found, "commit", "0" if value == DEFAULT else value)


def _option_and_point(setting: str) -> tuple[str, str]:
    """Return option and mount point."""
    key, _, point = setting.removeprefix("mounts.").partition(":")
    return key, point


def _find_mount(host: Host, key: str, point: str) -> Mount | None:
    """Return the mount of a setting, None if the option cannot be set there."""
    from agent.machine.mounts import read_mounts  # loads the C library

    mounts = read_mounts(host.fs)
    found = next((m for m in reversed(mounts) if m.point == point), None)
    if found is None or key == "atime":
        return found
    first = next(m for m in mounts if m.device == found.device)
    return found if first is found else None


def _mount_control(host: Host) -> Mounts:
    from agent.machine.mounts import HostMounts

    if host.mounts is not None:
        return host.mounts
    if host.fs.root != Path("/"):
        raise KernelFileError("cannot change a mount: mounts are changed only with --root /")
    return HostMounts()
