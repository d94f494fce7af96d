"""A task's volumes → where they are on the host, and properties of its unit (docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.api import TaskSpec
from agent.api.volumes import Volume, VolumeKind
from agent.core.records import user_of

OWNER = 1_900_000_000
"""User and group of all files in volumes, on disk; systemd gives this number to nobody
(UIDS-GIDS.md: 1879048192 to 2147352575 are unused)."""
_SHELL = ("/usr/bin/nsenter", "--target=1", "--mount", "/bin/sh", "-c")
_MOUNT = (
    'uid=$(readlink "/run/systemd/dynamic-uid/direct:$1") && root=$(readlink -f "$3") || exit 1; '
    "owner=$2; shift 3; "
    'while [ $# -gt 0 ]; do at=$root$2; [ "$(readlink -m "$at")" = "$at" ] || '
    '{ echo "the image has a link on the way to $2: no volume can be there" >&2; exit 1; }; '
    'while umount -l "$at" 2>/dev/null; do :; done; mkdir -p "$at" || exit 1; '
    'if [ "$1" = tmpfs ]; then mount -t tmpfs -o "$3,mode=1777,nosuid,nodev" tmpfs "$at"; else '
    'chown "$owner:$owner" "$1" && mount --bind -o "X-mount.idmap=b:$owner:$uid:1" "$1" "$at"; '
    "fi || exit 1; shift 3; done"
)
"""Mounts each first path at the second below the root, files of the owner shown as a dynamic
user's. Nothing but the agent changes a root, so no link comes after the look for one. The top
folder of a volume is given to the owner here: the agent has no right to (docs/adr/0084)."""
_UNMOUNT = (
    'root=$(readlink -f "$1") || exit 0; shift; '
    'for at; do while umount -l "$root$at" 2>/dev/null; do :; done; done; true'
)
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
    """Of a snapshot."""


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


def volume_properties(task_id: str, spec: TaskSpec, state: str, root: str) -> dict[str, object]:
    """Return what a unit needs for its volumes; it goes on top of the hardening.

    A dynamic user has another number with each start, and files keep theirs. So what is on disk
    is mounted, right before the start, in a way that shows `OWNER` as the task's user and back
    (docs/adr/0076). It is mounted into the task's root, which the unit takes with all mounts in
    it: `BindPaths=` would be done for the host's own commands of the unit, too, in the host's
    root. What is not named in `ReadWritePaths=` is read only (`ProtectSystem=strict`).
    """
    if not spec.volumes:
        return {}
    words = [
        word
        for name, volume in spec.volumes.items()
        for word in (
            ("tmpfs", volume.path, f"size={volume.max_bytes}")
            if volume.kind is VolumeKind.TMPFS
            else (f"{state}/{place_of(task_id, spec.entitlement, name, volume)}", volume.path, "")
        )
    ]
    paths = [volume.path for volume in spec.volumes.values()]
    own = [f"-+{v.path}" for v in spec.volumes.values() if v.kind is not VolumeKind.SHARED]
    return {
        **({"ReadWritePaths": own} if own else {}),
        "ExecStartPre": [[*_SHELL, _MOUNT, "sh", user_of(task_id), str(OWNER), root, *words]],
        "ExecStopPost": [[*_SHELL, _UNMOUNT, "sh", root, *paths]],
        "RootDirectoryStartOnly": True,
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
        f"volumes: {need} bytes do not fit: the disk has {disk_bytes} and volumes of other"
        f" tasks may take {taken}"
    )


def stray_scratch(names: Iterable[str], task_id: str, spec: TaskSpec | None) -> list[str]:
    """Return the scratch volumes of a task that its specification does not name (None: all)."""
    wanted = set() if spec is None else set(places(task_id, spec, VolumeKind.SCRATCH))
    mine = (n for n in names if (found := read_name(n)) is not None and found.task_id == task_id)
    return sorted(name for name in mine if f"scratch/{name}" not in wanted)
