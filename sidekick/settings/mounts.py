"""Options of file systems that are mounted already: times of access, lazy times, commits.

Only options that a remount sets and takes back: what is safe to lose is said by whoever mounts.
Source: mount(8), "Filesystem-independent mount options"; Linux, Documentation/admin-guide/ext4.rst
and btrfs(5) for `commit`, whose 0 stands for the default and which is then not shown.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from sidekick.profile import Profile
from sidekick.report import Wanted
from sidekick.setting import Host, Setting
from wire.errors import FieldError

MOUNT = "/bin/mount"
DEFAULT = "default"
COMMITS = frozenset({"ext4", "btrfs"})
"""File systems that know `commit`."""
_POINT = re.compile(r"/[A-Za-z0-9_./-]{0,200}\Z")


class MountOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked of one mount point."""

    atime: Literal["noatime", "relatime", "strictatime"] | None = None
    """Whether reading a file writes its time of access."""
    lazytime: Literal["on", "off"] | None = None
    """Whether times stay in memory until the inode is written for another reason."""
    commit: Annotated[int, Meta(ge=1, le=300)] | None = None
    """Seconds after which what was written is on the disk by itself."""
    required: bool = False
    """Whether a host without that mount or option cannot run the profile."""


class MountsSetting(Setting):
    """One value for each mount point and option: `mounts.atime:/var/lib/twine`."""

    kind: ClassVar[str] = "mounts"
    section: ClassVar[Any] = dict[str, MountOptions]

    def check(self, profile: Profile) -> list[FieldError]:
        """Return the keys that are no mount points."""
        found: dict[str, MountOptions] = profile.section(self.kind) or {}
        return [
            FieldError(field=f"mounts.{point}", reason="must be an absolute path")
            for point in found
            if not _POINT.fullmatch(point) or ".." in point.split("/")
        ]

    def wanted(self, profile: Profile, host: Host) -> list[Wanted]:  # noqa: ARG002
        """Return one value for each option that is given."""
        found: dict[str, MountOptions] = profile.section(self.kind) or {}
        return [
            Wanted(
                setting=f"mounts.{key}:{point}",
                value=str(value),
                required=options.required,
                source=profile.source_of(f"mounts.{point}"),
            )
            for point, options in found.items()
            for key, value in msgspec.structs.asdict(options).items()
            if key != "required" and value is not None
        ]

    def lacking(self, setting: str) -> str:
        """Return why a host has none."""
        key, point = _parts(setting)
        return f"nothing is mounted at {point}, or its file system has no {key} to set"

    def read(self, host: Host, setting: str) -> str | None:
        """Return the option in force; of mounts over each other the last one counts."""
        key, point = _parts(setting)
        found = _options(host, point)
        if found is None:
            return None
        kind, options = found
        if key == "atime":
            return next((o for o in ("noatime", "relatime") if o in options), "strictatime")
        if key == "lazytime":
            return "on" if "lazytime" in options else "off"
        if kind not in COMMITS:
            return None
        return next((o[7:] for o in options if o.startswith("commit=")), DEFAULT)

    def write(self, host: Host, setting: str, value: str) -> None:
        """Remount with that one option changed; the others come from the kernel, not from fstab."""
        key, point = _parts(setting)
        option = {
            "atime": value,
            "lazytime": "lazytime" if value == "on" else "nolazytime",
            "commit": f"commit={0 if value == DEFAULT else value}",
        }[key]
        source = ("--options-source=mtab", "--options-source-force")
        host.processes.run([MOUNT, *source, "-o", f"remount,{option}", point])


def _parts(setting: str) -> tuple[str, str]:
    """Return option and mount point."""
    key, _, point = setting.removeprefix("mounts.").partition(":")
    return key, point


def _options(host: Host, point: str) -> tuple[str, list[str]] | None:
    """Return type and options of what is mounted there."""
    found = None
    for line in (host.fs.find("/proc/self/mounts") or "").splitlines():
        _, at, kind, options, *_ = line.split()
        if at == point:
            found = (kind, options.split(","))
    return found
