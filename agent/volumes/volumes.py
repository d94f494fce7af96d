"""The volumes of this host: btrfs subvolumes with data of tasks (docs/volumes.md).

Every step can be repeated. So a volume that was incomplete when the agent died is completed at the
task's next start. The name of a volume shows its task; there is no other record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from agent.api import TaskSpec
from agent.api.volumes import VolumeInfo, VolumeInfos, VolumeKind
from agent.machine import Btrfs, QuotaMode
from agent.runtime.crashpoints import crash_point
from agent.volumes.core.volumes import (
    FOLDERS,
    KINDS_OF_A_TASK,
    VolumeName,
    name_of,
    paths_of,
    read_name,
    unwanted_scratch,
)
from wire.errors import BtrfsError, Conflict, HostError, NotFound, Unprocessable

Users = Callable[[], dict[str, list[str]]]
"""Returns, for each volume's path below the state folder, the tasks that use it."""


class Volumes:
    """Subvolumes below `scratch` and `volumes`. Blocking: call it through the lane of btrfs."""

    def __init__(self, btrfs: Btrfs, state: Path) -> None:
        """Keep volumes below the state folder."""
        self._btrfs = btrfs
        self.state = state
        for folder in FOLDERS:
            (state / folder).mkdir(parents=True, exist_ok=True)

    def admit(self, task_id: str, spec: TaskSpec) -> None:
        """Raise `Unprocessable` if a volume has a limit and quotas are off."""
        limited = [n for n, v in spec.volumes.items() if v.max_bytes and v.kind != "tmpfs"]
        if not limited:
            return
        try:
            if self._btrfs.enable_quota(self.state) is not QuotaMode.OFF:
                return
            why = "they are still off"
        except BtrfsError as e:
            why = str(e)
        raise Unprocessable(
            f"task {task_id} cannot run: volumes.{limited[0]}.max_bytes needs quotas of "
            f"the file system at {self.state}, which has none: {why}",
            hint="remove the limit, or put the state folder on btrfs with quotas",
        )

    def disk_bytes(self) -> int:
        """Return the size of the disk with the volumes."""
        return self._btrfs.free_bytes(self.state)[0]

    def ensure(self, task_id: str, spec: TaskSpec) -> None:
        """Create and limit a task's volumes; remove scratch volumes that it no longer names.

        Raises `HostError` if a shared volume does not exist.
        """
        self.drop_scratch(task_id, spec)
        for place in paths_of(task_id, spec, VolumeKind.SHARED):
            if self._btrfs.find(self.state / place) is None:
                raise HostError(
                    f"task {task_id} cannot start: there is no volume {place.partition('/')[2]}"
                    " on this machine",
                    hint="start the task that owns it; `twine-agent volume list` shows all",
                )
        kept = paths_of(task_id, spec, *KINDS_OF_A_TASK)
        for place, volume in kept.items():
            path = self.state / place
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._btrfs.find(path) is None:
                self._btrfs.create(path)
                crash_point("volume.made")
            self._limit(path, volume.max_bytes)
            crash_point("volume.limited")

    def _limit(self, path: Path, max_bytes: int | None) -> None:
        """Set a limit and read it back from the kernel."""
        if max_bytes is not None:
            self._btrfs.enable_quota(self.state)
        usage = self._btrfs.usage(path)
        if max_bytes == (usage.max_bytes if usage else None):
            return
        self._btrfs.limit(path, max_bytes)
        usage = self._btrfs.usage(path)
        if usage is None or usage.max_bytes != max_bytes:
            found = None if usage is None else usage.max_bytes
            raise HostError(f"the limit of {path} is {found} and not {max_bytes} bytes")

    def drop_scratch(self, task_id: str, spec: TaskSpec | None = None) -> None:
        """Remove scratch volumes of a task that its specification does not name; None: all."""
        folder = self.state / "scratch"
        for name in unwanted_scratch(self._btrfs.children(folder), task_id, spec):
            self._btrfs.delete(folder / name)
            crash_point("scratch.removed")

    def all(self, users: Users) -> VolumeInfos:
        """Return all volumes and snapshots, sorted by name."""
        used = users()
        volumes = [self._info(*one, used) for one in self._each_volume()]
        return VolumeInfos(
            volumes=sorted(volumes, key=lambda v: (v.entitlement, v.name)),
            quota=self._btrfs.quota(self.state).value,
        )

    def _each_volume(self) -> Iterator[tuple[str, str, VolumeName]]:
        """Yield folder (below the state folder), name and parsed name of each volume."""
        for folder in self.folders():
            for name in self._btrfs.children(self.state / folder):
                if (named := read_name(name)) is not None:
                    yield folder, name, named

    def folders(self) -> list[str]:
        """Return the folders that hold volumes, below the state folder."""
        top = self.state / "volumes"
        return ["scratch", *sorted(f"volumes/{p.name}" for p in top.iterdir() if p.is_dir())]

    def _info(
        self, folder: str, name: str, named: VolumeName, used: dict[str, list[str]]
    ) -> VolumeInfo:
        usage = self._btrfs.usage(self.state / folder / name)
        kind = "scratch" if folder == "scratch" else "snapshot" if named.label else "persistent"
        return VolumeInfo(
            entitlement=folder.partition("/")[2],
            name=name,
            kind=kind,
            used_bytes=None if usage is None else usage.used_bytes,
            max_bytes=None if usage is None else usage.max_bytes,
            tasks=used.get(f"{folder}/{name}", []),
        )

    def snapshot(self, entitlement: str, name: str, label: str, users: Users) -> VolumeInfo:
        """Make a read-only snapshot of a persistent volume."""
        named = self._named(entitlement, name)
        if named.label:
            raise Conflict(f"there is already a snapshot {name}")
        folder, target = f"volumes/{entitlement}", name_of(named.task_id, named.volume, label)
        source = self.state / folder / name
        self._btrfs.snapshot(source, self.state / folder / target, read_only=True)
        crash_point("volume.snapshot-made")
        self._btrfs.sync(self.state / folder)
        return self._info(folder, target, VolumeName(named.task_id, named.volume, label), users())

    def remove(self, entitlement: str, name: str, users: Users) -> None:
        """Remove a persistent volume or a snapshot; raises `Conflict` while a task uses it."""
        self._named(entitlement, name)
        place = f"volumes/{entitlement}/{name}"
        if tasks := users().get(place):
            raise Conflict(
                f"volume {name} is not removed: task {', '.join(tasks)} uses it",
                hint="stop the task first",
            )
        self._btrfs.delete(self.state / place)
        crash_point("volume.removed")

    def _named(self, entitlement: str, name: str) -> VolumeName:
        named = read_name(name)
        if named is None or self._btrfs.find(self.state / "volumes" / entitlement / name) is None:
            raise NotFound(
                f"entitlement {entitlement} has no volume {name} on this machine",
                hint="twine-agent volume list",
            )
        return named


def tasks_by_volume(specs: Mapping[str, TaskSpec]) -> dict[str, list[str]]:
    """Return the tasks that use each volume on disk, by its path below the state folder."""
    users: dict[str, list[str]] = {}
    for task_id, spec in sorted(specs.items()):
        for place in paths_of(task_id, spec, *KINDS_OF_A_TASK, VolumeKind.SHARED):
            users.setdefault(place, []).append(task_id)
    return users
