"""Volumes: storage of a task in addition to its root file system (docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import COUNT_MAX, END, Bytes, Id, Name, Reported, Written
from wire.units import size_text

_NAME = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
VOLUME_PATTERN = rf"^{_NAME}\.{_NAME}(?:@{_NAME})?" + END
"""TASK.VOLUME, and of a snapshot TASK.VOLUME@LABEL."""
MAX_VOLUMES = 16


class VolumeKind(StrEnum):
    """How long a volume lives, and which tasks use it."""

    SCRATCH = "scratch"
    """Belongs to the task, and is removed with it."""
    PERSISTENT = "persistent"
    """Stays on the host until it is removed; the task finds it again."""
    SHARED = "shared"
    """A persistent volume of another task of the entitlement, to be read only."""
    TMPFS = "tmpfs"
    """In memory, new with each start, and part of what the task may use of memory."""


MountPath = Annotated[
    str,
    Meta(
        pattern=r"^(?:/\.?[A-Za-z0-9_@+=-][A-Za-z0-9_.@+=-]*)+" + END,
        max_length=255,
        description="an absolute path of letters, digits and ._@+=-, without . and ..",
    ),
]
VolumeOf = Annotated[
    str,
    Meta(pattern=rf"^(?:{_NAME}\.{_NAME})?" + END, max_length=127, description="TASK.VOLUME"),
]


class Volume(Written, frozen=True, kw_only=True):
    """One volume of a task."""

    kind: VolumeKind = VolumeKind.SCRATCH
    path: MountPath
    """Where the task finds it; made in its root where it is not there."""
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=COUNT_MAX)] | None = None
    """Most that it holds; a write beyond fails (EDQUOT, in a tmpfs ENOSPC). None: no limit;
    a tmpfs needs one."""
    source: VolumeOf = ""
    """The volume that a shared one shows, as TASK.VOLUME."""


VolumeMap = Annotated[dict[Name, Volume], Meta(max_length=MAX_VOLUMES)]


class VolumeInfo(Reported, frozen=True, kw_only=True):
    """One volume, or snapshot of one, as it is on the host."""

    entitlement: Id
    name: Id
    """TASK.VOLUME, of a snapshot TASK.VOLUME@LABEL."""
    kind: Id
    """`persistent`, `scratch` or `snapshot`."""
    used_bytes: Bytes | None = None
    """None: the file system does not count."""
    max_bytes: Bytes | None = None
    tasks: Annotated[list[Id], Meta(max_length=100_000)] = []
    """Tasks that have it; while there are any it cannot be removed."""


class VolumeInfos(Reported, frozen=True, kw_only=True):
    """All volumes of a machine."""

    volumes: Annotated[list[VolumeInfo], Meta(max_length=1_000_000)]
    quota: Id = "off"
    """How the file system counts: `simple`, `regular`, `off` (limits turn it on)."""


_RESERVED = ("/proc", "/sys", "/dev")


def contradiction(volumes: Mapping[str, Volume], memory_max_bytes: int) -> tuple[str, str] | None:
    """Return field and reason of the first contradiction; None: all fits together."""
    taken: dict[str, str] = {}
    for name, volume in volumes.items():
        if why := _odd(volume, memory_max_bytes):
            return f"volumes.{name}.{why[0]}", why[1]
        for path, other in taken.items():
            if _within(volume.path, path) or _within(path, volume.path):
                reason = f"{volume.path} is not apart from {path} of volume {other}"
                return f"volumes.{name}.path", reason
        taken[volume.path] = name
    return None


def _odd(volume: Volume, memory_max_bytes: int) -> tuple[str, str] | None:
    if any(_within(volume.path, top) for top in _RESERVED):
        return "path", f"{volume.path} is the kernel's: not below {', '.join(_RESERVED)}"
    if volume.kind is VolumeKind.SHARED:
        if not volume.source:
            return "source", "a shared volume says whose it is: TASK.VOLUME"
        if volume.max_bytes is not None:
            return "max_bytes", "a shared volume has the limit that its owner gave it"
        return None
    if volume.source:
        return "source", f"only of a shared volume, and this one is {volume.kind}"
    if volume.kind is VolumeKind.TMPFS:
        if volume.max_bytes is None:
            return "max_bytes", "a tmpfs needs a limit: it is in memory"
        if volume.max_bytes > memory_max_bytes:
            return "max_bytes", (
                f"{size_text(volume.max_bytes)} is more than limits.memory_max_bytes"
                f" ({size_text(memory_max_bytes)}), which includes it"
            )
    return None


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
