"""Paths, names and limits of a task's volumes on the host (docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.api import TaskSpec
from agent.api.volumes import Volume, VolumeKind
from wire.units import about_size

OWNER = 1_900_000_000
"""User and group id of all files in volumes on disk. systemd assigns it to no user
(UIDS-GIDS.md: 1879048192 to 2147352575 are unused)."""
KINDS_OF_A_TASK = (VolumeKind.SCRATCH, VolumeKind.PERSISTENT)
"""Kinds of volumes on disk that belong to one task."""
FOLDERS = ("scratch", "volumes")
"""Folders below the state folder: for scratch volumes, and for persistent ones."""


@dataclass(frozen=True, slots=True)
class VolumeName:
    """The parts of the name of a volume's subvolume."""

    task_id: str
    volume: str
    label: str = ""
    """Label of a snapshot; empty for a volume."""


def name_of(task_id: str, volume: str, label: str = "") -> str:
    """Return the name of a volume's subvolume; its parts contain no dot and no @."""
    return f"{task_id}.{volume}" + (f"@{label}" if label else "")


def read_name(name: str) -> VolumeName | None:
    """Return the parts of a subvolume's name, None if it is not the name of a volume."""
    left, at, label = name.partition("@")
    task_id, dot, volume = left.partition(".")
    if not (task_id and dot and volume) or "." in volume or (at and not label):
        return None
    return VolumeName(task_id, volume, label)


def path_of(task_id: str, entitlement: str, name: str, volume: Volume) -> str:
    """Return the path of a volume below the state folder; empty for a volume in memory."""
    match volume.kind:
        case VolumeKind.SCRATCH:
            return f"scratch/{name_of(task_id, name)}"
        case VolumeKind.PERSISTENT:
            return f"volumes/{entitlement}/{name_of(task_id, name)}"
        case VolumeKind.SHARED:
            return f"volumes/{entitlement}/{volume.source}"
        case _:
            return ""


def paths_of(task_id: str, spec: TaskSpec, *kinds: VolumeKind) -> dict[str, Volume]:
    """Return the volumes of these kinds, by path (`path_of`)."""
    return {
        path_of(task_id, spec.entitlement, name, volume): volume
        for name, volume in spec.volumes.items()
        if volume.kind in kinds
    }


def limits_of(specs: Mapping[str, TaskSpec]) -> dict[str, int]:
    """Return the limits of the volumes on disk, in bytes by path."""
    limits: dict[str, int] = {}
    for task_id, spec in specs.items():
        kept = paths_of(task_id, spec, *KINDS_OF_A_TASK)
        limits |= {path: v.max_bytes for path, v in kept.items() if v.max_bytes is not None}
    return limits


def volumes_refusal(
    task_id: str, spec: TaskSpec, others: Mapping[str, TaskSpec], disk_bytes: int
) -> str:
    """Return why a task's volumes do not fit on the disk, empty if they do."""
    own_limits = limits_of({task_id: spec})
    promised = limits_of({t: s for t, s in others.items() if t != task_id})
    need, taken = sum(own_limits.values()), sum(promised.values())
    if not own_limits or need + taken <= disk_bytes:
        return ""
    return (
        f"volumes: {about_size(need)} do not fit: the disk has {about_size(disk_bytes)}, "
        f"and volumes of other tasks may use {about_size(taken)} of that"
    )


def unwanted_scratch(names: Iterable[str], task_id: str, spec: TaskSpec | None) -> list[str]:
    """Return the scratch volumes of a task that its specification does not name (None: all)."""
    wanted = set() if spec is None else set(paths_of(task_id, spec, VolumeKind.SCRATCH))
    parsed = {name: read_name(name) for name in names}
    of_task = (name for name, volume in parsed.items() if volume and volume.task_id == task_id)
    return sorted(name for name in of_task if f"scratch/{name}" not in wanted)
