"""Sends no command from a store that was restored from a copy until an operator has released it.

The tasks on machines may be newer than the copy. So the control plane shows how the two differ. The
loops that start, stop and move tasks begin only after an operator's release. Tasks that the copy
lacks continue to run even then, until each is released (docs/adr/0111).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from control_plane.agents.core.restored import differences, predates_restore
from control_plane.agents.region import Region
from control_plane.api.jobs import JobRecord
from control_plane.api.restored import Restored, RestoredView
from control_plane.runtime.table import Table
from control_plane.scheduler.ports import Directory
from control_plane.store import Put, Store
from control_plane.store.records import RESTORED, decode, encode
from wire.errors import Conflict, NotFound

log = logging.getLogger(__name__)

GENERATIONS_BETWEEN = 1 << 20
"""A job that is created again starts above the generations that its tasks had since the copy: room
for a million changes. So its agents get its specification again, and keep an unchanged process."""


class RestoredStore:
    """The stored note about a restore, and the releases by operators."""

    def __init__(
        self, store: Store, region: Region, jobs: Table[JobRecord], directory: Directory
    ) -> None:
        self._store, self._region, self._jobs = store, region, jobs
        self._directory = directory
        self._note: Restored | None = None
        self._revision = 0
        self._lock = asyncio.Lock()
        self.begin: Callable[[], None] = lambda: None
        """Starts the loops that send commands; the owner of the loops sets it."""

    async def load(self) -> None:
        """Read the note about a restore; the caller does that before it queries any agent."""
        entry = await self._store.get(RESTORED)
        if entry is not None:
            self._note, self._revision = decode(entry.value, Restored, RESTORED), entry.revision
            self._region.observations.restored = self._note.epoch

    @property
    def skipped_generations(self) -> int:
        """Return how many generations new jobs skip."""
        return GENERATIONS_BETWEEN if self._note is not None else 0

    @property
    def needs_release(self) -> bool:
        """Return whether an operator still has to release the store."""
        return self._note is not None and not self._note.released_at

    def describe_wait(self) -> str:
        """Describe the action that operators have to take; empty: none is needed."""
        if not self.needs_release:
            return ""
        return (
            "the store was restored from a copy: the control plane sends no commands until an "
            "operator reads `twinectl restored show` and runs `twinectl restored "
            "release`"
        )

    async def view(self) -> RestoredView:
        """Return how the tasks on machines differ from the copy."""
        view = RestoredView(restored=self._note, tasks=[], unheard=[])
        if self._note is None:
            return view
        observations, table = self._region.observations, self._region.broker.table
        for name in table:
            record, observation = table.find(name), observations.peek(name)
            if record is None or record.facts is None:
                continue
            if not observation.answering:
                view.unheard.append(name)
                continue
            placed = self._directory.tasks(name)
            wanted = {task: self._jobs.find(entry.job) for task, entry in placed.items()}
            seen, epoch = observation.tasks, self._note.epoch
            view.tasks.extend(differences(name, seen, wanted, self._jobs, epoch))
            await self._region.runtime.checkpoint()
        return view

    async def release(self, by: str) -> Restored:
        """Begin to act on the restored records; `Conflict` if no store waits for a release."""
        async with self._lock:
            if self._note is None or not self.needs_release:
                raise Conflict("no restored store waits for a release")
            await self.load()  # an earlier release may be stored although its answer was lost
            if self.needs_release:
                at = self._region.runtime.wall()
                note = replace(self._note, released_at=at, released_by=by)
                compare = {RESTORED: self._revision}
                self._revision = await self._store.txn(compare, [Put(RESTORED, encode(note))])
                self._note = note
            log.warning(
                "the control plane acts on the restored store from now on", extra={"by": by}
            )
            self.begin()
            return self._note

    def release_task(self, machine: str, task: str) -> None:
        """Stop a task that the copy of the store does not contain.

        The release is in memory only: after a restart a task that still runs is shown as before.
        """
        status = self._region.observations.peek(machine).tasks.get(task)
        is_known = task in self._directory.tasks(machine)
        epoch = self._note.epoch if self._note is not None else 0
        if status is None or is_known or not predates_restore(status, epoch):
            raise NotFound(
                f"machine {machine} runs no task {task} that the restored store does not contain",
                hint="twinectl restored show",
            )
        self._region.observations.released_tasks.setdefault(machine, set()).add(task)
        log.warning("unknown task released", extra={"machine": machine, "task": task})
        self._region.observations.changed(machine)
