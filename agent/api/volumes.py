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
"""TASK.VOLUME; a snapshot is TASK.VOLUME@LABEL."""
MAX_VOLUMES = 16


class VolumeKind(StrEnum):
    """How long a volume lives, and which tasks use it."""

    SCRATCH = "scratch"
    """Belongs to the task, and is removed with it."""
    PERSISTENT = "persistent"
    """Stays on the host until it is removed; later starts of the task use it again."""
    SHARED = "shared"
    """A persistent volume of another task of the entitlement, mounted read-only."""
    TMPFS = "tmpfs"
    """In memory, new with each start; it counts towards the task's memory limit."""


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
    """Mount point in the task; created if the root does not have it."""
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=COUNT_MAX)] | None = None
    """Largest size; a write beyond it fails (EDQUOT, in a tmpfs ENOSPC). None: no limit. A tmpfs
    needs a limit."""
    source: VolumeOf = ""
    """For a shared volume: the volume to mount, as TASK.VOLUME."""


VolumeMap = Annotated[dict[Name, Volume], Meta(max_length=MAX_VOLUMES)]


class VolumeInfo(Reported, frozen=True, kw_only=True):
    """One volume or snapshot of a host."""

    entitlement: Id
    name: Id
    """TASK.VOLUME; a snapshot is TASK.VOLUME@LABEL."""
    kind: Id
    """`persistent`, `scratch` or `snapshot`."""
    used_bytes: Bytes | None = None
    """None: the file system does not count usage."""
    max_bytes: Bytes | None = None
    tasks: Annotated[list[Id], Meta(max_length=100_000)] = []
    """Tasks that use it; a volume with tasks cannot be removed."""


class VolumeInfos(Reported, frozen=True, kw_only=True):
    """All volumes of a machine."""

    volumes: Annotated[list[VolumeInfo], Meta(max_length=1_000_000)]
    quota: Id = "off"
    """How the file system counts usage: `simple`, `regular`, `off` (a limit turns it on)."""


_RESERVED = ("/proc", "/sys", "/dev")


def contradiction(volumes: Mapping[str, Volume], memory_max_bytes: int) -> tuple[str, str] | None:
    """Return field and reason of the first contradiction; None for none."""
    taken: dict[str, str] = {}
    for name, volume in volumes.items():
        if why := _contradiction_of(volume, memory_max_bytes):
            return f"volumes.{name}.{why[0]}", why[1]
        for path, other in taken.items():
            if _within(volume.path, path) or _within(path, volume.path):
                reason = f"{volume.path} overlaps {path} of volume {other}"
                return f"volumes.{name}.path", reason
        taken[volume.path] = name
    return None


def _contradiction_of(volume: Volume, memory_max_bytes: int) -> tuple[str, str] | None:
    if any(_within(volume.path, top) for top in _RESERVED):
        return "path", (
            f"{volume.path} is reserved for the kernel: choose a path outside "
            f"{', '.join(_RESERVED)}"
        )
    if volume.kind is VolumeKind.SHARED:
        if not volume.source:
            return "source", "a shared volume names its owner as TASK.VOLUME"
        if volume.max_bytes is not None:
            return "max_bytes", "a shared volume has the limit that its owner set"
        return None
    if volume.source:
        return "source", f"only a shared volume can have it; this one is {volume.kind}"
    if volume.kind is VolumeKind.TMPFS:
        if volume.max_bytes is None:
            return "max_bytes", "a tmpfs needs a limit, because it uses memory"
        if volume.max_bytes > memory_max_bytes:
            return "max_bytes", (
                f"{size_text(volume.max_bytes)} exceeds limits.memory_max_bytes "
                f"({size_text(memory_max_bytes)}), which includes it"
            )
    return None


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")
