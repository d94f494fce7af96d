"""The tasks' data on the host's disk: their records, and the roots that they run from."""

from __future__ import annotations

import logging
from dataclasses import replace

from agent.images.roots import TaskRoots
from agent.runtime.core.records import TASK_UNITS, TaskRecord, Tombstone, task_of
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal, Replay
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from agent.tasks.core.reconcile import rebuilt
from agent.tasks.core.unit_properties import key_in
from wire.errors import HostError

log = logging.getLogger(__name__)


class TaskStorage:
    """Reads and writes records and roots, each kind in a thread of its own.

    Every method may raise `HostError`: the disk is full, read-only or broken.
    """

    def __init__(self, journal: Journal, roots: TaskRoots, lanes: Lanes) -> None:
        self._journal, self._roots, self._lanes = journal, roots, lanes

    async def save(self, record: TaskRecord | Tombstone, *, durable: bool = True) -> None:
        """Replace the record of a task; `durable` as in `Journal.save`."""
        await self._lanes.run("journal", self._journal.save, record, durable=durable)

    async def forget(self, task_id: str) -> None:
        """Remove the expired tombstone of a task."""
        await self._lanes.run("journal", self._journal.forget, task_id)

    async def set_aside(self, task_id: str) -> None:
        """Keep a copy of an unreadable record, for diagnosis."""
        await self._lanes.run("journal", self._journal.set_aside, task_id)

    async def replay(self, units: Units, events: HostEvents) -> Replay:
        """Return all records, and rebuild those that are missing or unreadable.

        They are rebuilt from their copies in memory and the running units; unreadable records are
        set aside. A rebuilt record counts even if it cannot be written, for example on a read-only
        disk.
        """
        replay = await self._lanes.run("journal", self._journal.replay)
        if not replay.copies:
            return replay
        seen = {task_of(u.unit): key_in(u.description) for u in await units.all(TASK_UNITS)}
        restored = rebuilt(replay.copies, seen, replay.unreadable)
        for task_id, record in restored.items():
            why = replay.unreadable.get(task_id, "it does not exist")
            log.error("a task record was rebuilt", extra={"task": task_id, "why": why})
            message = (
                f"its record could not be read ({why}); it was rebuilt from its copy in memory"
            )
            events.add("agent", task_id, message)
            await self._lanes.run("journal", self._save_rebuilt, record)
        left = {t: why for t, why in replay.unreadable.items() if t not in restored}
        return replace(replay, tasks={**replay.tasks, **restored}, unreadable=left, copies={})

    def _save_rebuilt(self, record: TaskRecord) -> None:
        self._journal.set_aside(record.task_id)
        try:
            self._journal.save(record)
        except HostError as e:
            extra = {"task": record.task_id, "why": str(e)}
            log.warning("a rebuilt record exists only in memory", extra=extra)

    async def find_root(self, task: TaskRecord) -> tuple[bool, bool]:
        """Return whether the task has a root made from its image, and whether it has any root."""
        return await self._lanes.run("btrfs", self._roots.find, task.task_id, task.spec.image)

    async def prepare_root(self, task: TaskRecord) -> None:
        """Create the root of a task from its image."""
        await self._lanes.run("btrfs", self._roots.prepare, task.task_id, task.spec.image)

    async def remove_root(self, task_id: str) -> None:
        """Remove the root of a task; succeeds if there is none."""
        await self._lanes.run("btrfs", self._roots.remove, task_id)

    async def tasks_with_root(self) -> list[str]:
        """Return the ids of all tasks that have a root."""
        return await self._lanes.run("btrfs", self._roots.all)
