"""A store that was restored from a copy: no command is sent until an operator has released it.

What runs on machines may be newer than the copy. So the control plane shows how the two differ. The
loops that start, stop and move tasks begin only after an operator's release. Tasks that the copy
does not know run on even then, until each is released (docs/adr/0111).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from control_plane.agents.core.restored import differences, is_of_before
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
    """The stored note of a restore, and the operators' releases."""

    def __init__(
        self, store: Store, region: Region, jobs: Table[JobRecord], directory: Directory
    ) -> None:
        self._store, self._region, self._jobs = store, region, jobs
        self._directory = directory
        self._noted: Restored | None = None
        self._revision = 0
        self._lock = asyncio.Lock()
        self.begin: Callable[[], None] = lambda: None
        """Starts the loops that send commands; the owner of the loops sets it."""

    async def load(self) -> None:
        """Read the note of the restore, before any agent is queried."""
        entry = await self._store.get(RESTORED)
        if entry is not None:
            self._noted, self._revision = decode(entry.value, Restored, RESTORED), entry.revision
            self._region.observations.restored = self._noted.epoch

    @property
    def skipped_generations(self) -> int:
        """Return how many generations new jobs skip."""
        return GENERATIONS_BETWEEN if self._noted is not None else 0

    @property
    def waits(self) -> bool:
        """Return whether an operator still has to release the store."""
        return self._noted is not None and not self._noted.released_at

    def words(self) -> str:
        """Describe the action that operators have to take; empty: none is needed."""
        if not self.waits:
            return ""
        return (
            "the store was restored from a copy: the control plane sends no commands until an "
            "operator reads `twinectl restored show` and runs `twinectl restored "
            "release`"
        )

    async def view(self) -> RestoredView:
        """Return how machines and copy differ, by machine."""
        view = RestoredView(restored=self._noted, tasks=[], unheard=[])
        if self._noted is None:
            return view
        observations, table = self._region.observations, self._region.broker.table
        for name in table:
            record, observation = table.find(name), observations.look(name)
            if record is None or record.facts is None:
                continue
            if not observation.answering:
                view.unheard.append(name)
                continue
            placed = self._directory.tasks(name)
            wanted = {task: self._jobs.find(entry.job) for task, entry in placed.items()}
            seen, epoch = observation.tasks, self._noted.epoch
            view.tasks.extend(differences(name, seen, wanted, self._jobs, epoch))
            await self._region.runtime.checkpoint()
        return view

    async def release(self, by: str) -> Restored:
        """Begin to act on the restored records; `Conflict` if no store waits for a release."""
        async with self._lock:
            if self._noted is None or not self.waits:
                raise Conflict("no restored store waits for a release")
            await self.load()  # an earlier release may be stored although its answer was lost
            if self.waits:
                at = self._region.runtime.wall()
                noted = replace(self._noted, released_at=at, released_by=by)
                compare = {RESTORED: self._revision}
                self._revision = await self._store.txn(compare, [Put(RESTORED, encode(noted))])
                self._noted = noted
            log.warning(
                "the control plane acts on the restored store from now on", extra={"by": by}
            )
            self.begin()
            return self._noted

    def let_go(self, machine: str, task: str) -> None:
        """Stop a task that the copy of the store does not contain.

        The release is in memory only: after a restart a task that still runs is shown as before.
        """
        status = self._region.observations.look(machine).tasks.get(task)
        is_known = task in self._directory.tasks(machine)
        epoch = self._noted.epoch if self._noted is not None else 0
        if status is None or is_known or not is_of_before(status, epoch):
            raise NotFound(
                f"machine {machine} runs no task {task} that the restored store does not contain",
                hint="twinectl restored show",
            )
        self._region.observations.let_go.setdefault(machine, set()).add(task)
        log.warning("unknown task released", extra={"machine": machine, "task": task})
        self._region.observations.changed(machine)
