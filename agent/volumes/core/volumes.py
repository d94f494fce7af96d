"""A task's volumes → where they are on the host, and what they may take (docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.api import TaskSpec
from agent.api.volumes import Volume, VolumeKind
from wire.units import about_size

OWNER = 1_900_000_000
"""User and group of all files in volumes, on disk; systemd gives this number to no user
(UIDS-GIDS.md: 1879048192 to 2147352575 are unused)."""
KEPT = (VolumeKind.SCRATCH, VolumeKind.PERSISTENT)
"""What a task has on disk for itself."""
FOLDERS = ("scratch", "volumes")
"""Below the state folder: what goes with its task, and what stays."""


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a volume's subvolume, taken apart."""

    task_id: str
    volume: str
    label: str = ""
    """Label of a snapshot; empty for a volume."""


def name_of(task_id: str, volume: str, label: str = "") -> str:
    """Return the name of a volume's subvolume; neither ids nor names have a dot or an @."""
    return f"{task_id}.{volume}" + (f"@{label}" if label else "")


def read_name(name: str) -> Named | None:
    """Return what a subvolume is, None for a name that the agent never gives."""
    left, at, label = name.partition("@")
    task_id, dot, volume = left.partition(".")
    if not (task_id and dot and volume) or "." in volume or (at and not label):
        return None
    return Named(task_id, volume, label)


def place_of(task_id: str, entitlement: str, name: str, volume: Volume) -> str:
    """Return where a volume is, below the state folder; empty for one that is in memory."""
    match volume.kind:
        case VolumeKind.SCRATCH:
            return f"scratch/{name_of(task_id, name)}"
        case VolumeKind.PERSISTENT:
            return f"volumes/{entitlement}/{name_of(task_id, name)}"
        case VolumeKind.SHARED:
            return f"volumes/{entitlement}/{volume.source}"
        case _:
            return ""


def places(task_id: str, spec: TaskSpec, *kinds: VolumeKind) -> dict[str, Volume]:
    """Return the volumes of these kinds by where they are (`place_of`)."""
    return {
        place_of(task_id, spec.entitlement, name, volume): volume
        for name, volume in spec.volumes.items()
        if volume.kind in kinds
    }


def limits_of(specs: Mapping[str, TaskSpec]) -> dict[str, int]:
    """Return what volumes on disk may take, by where they are."""
    found: dict[str, int] = {}
    for task_id, spec in specs.items():
        kept = places(task_id, spec, *KEPT)
        found |= {place: v.max_bytes for place, v in kept.items() if v.max_bytes is not None}
    return found


def too_large(task_id: str, spec: TaskSpec, others: Mapping[str, TaskSpec], disk_bytes: int) -> str:
    """Return why a task's volumes do not fit on the disk, empty where they do."""
    mine = limits_of({task_id: spec})
    promised = limits_of({t: s for t, s in others.items() if t != task_id})
    need, taken = sum(mine.values()), sum(promised.values())
    if not mine or need + taken <= disk_bytes:
        return ""
    return (
        f"volumes: {about_size(need)} do not fit: the disk has {about_size(disk_bytes)} and volumes"
        f" of other tasks may take {about_size(taken)}"
    )


def stray_scratch(names: Iterable[str], task_id: str, spec: TaskSpec | None) -> list[str]:
    """Return the scratch volumes of a task that its specification does not name (None: all)."""
    wanted = set() if spec is None else set(places(task_id, spec, VolumeKind.SCRATCH))
    mine = (n for n in names if (found := read_name(n)) is not None and found.task_id == task_id)
    return sorted(name for name in mine if f"scratch/{name}" not in wanted)
