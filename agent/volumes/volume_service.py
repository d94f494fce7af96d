"""Requests of the API about volumes, carried out in the lane of btrfs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent.api import TaskSpec
from agent.api.volumes import VolumeInfo, VolumeInfos
from agent.runtime.core.records import TaskRecord
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.volumes.volumes import Volumes, tasks_by_volume

_LANE = "btrfs"


class VolumeService(TaskStage):
    """Lists, snapshots and removes volumes of this host, and creates those of tasks."""

    def __init__(
        self, volumes: Volumes, specs: Callable[[], Mapping[str, TaskSpec]], lanes: Lanes
    ) -> None:
        """`specs` returns the specifications of all tasks of this host."""
        self._volumes, self._specs, self._lanes = volumes, specs, lanes

    def _users(self) -> dict[str, list[str]]:
        return tasks_by_volume(self._specs())

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Create the volumes of a task and set their limits."""
        if task.spec.volumes or task.volumes:
            await self._lanes.run(_LANE, self._volumes.ensure, task.task_id, task.spec)
        return task

    resize = ensure  # limits can change while a task runs

    async def release(self, task_id: str) -> None:
        """Delete the scratch volumes of a removed task."""
        await self._lanes.run(_LANE, self._volumes.drop_scratch, task_id)

    async def all(self) -> VolumeInfos:
        """Return all volumes and snapshots."""
        return await self._lanes.run(_LANE, self._volumes.all, self._users)

    async def snapshot(self, entitlement: str, name: str, label: str) -> VolumeInfo:
        """Make a read-only snapshot of a persistent volume."""
        return await self._lanes.run(
            _LANE, self._volumes.snapshot, entitlement, name, label, self._users
        )

    async def remove(self, entitlement: str, name: str) -> None:
        """Remove a volume or snapshot, unless a task uses it at that moment."""
        await self._lanes.run(_LANE, self._volumes.remove, entitlement, name, self._users)
