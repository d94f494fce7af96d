"""The map of a job's shards to its tasks, which the job's owner sets; kept as long as the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from control_plane.api.jobs import JobRecord
from control_plane.api.shards import PARTS, ShardMapView, ShardPart, part_of, parts_of
from control_plane.runtime.readable import Readable
from control_plane.runtime.table import Checkpoint, Table
from control_plane.store import Store
from control_plane.store.records import SHARDS
from wire.errors import TwineError, Unprocessable

log = logging.getLogger(__name__)


class ShardMaps:
    """Stores and returns maps, and deletes the maps of deleted jobs."""

    def __init__(self, store: Store, jobs: Readable[JobRecord], checkpoint: Checkpoint) -> None:
        self._jobs = jobs
        self._table: Table[ShardPart] = Table(
            store, SHARDS, ShardPart, "shard map", checkpoint=checkpoint
        )
        self._deleted: set[str] = set()
        """Deleted jobs whose maps may still be stored."""
        self._wake = asyncio.Event()
        jobs.listen(self._job_changed)

    async def load(self) -> None:
        """Read all maps; the jobs must be loaded already."""
        await self._table.load()
        for name in self._table.names():
            job = name.partition("/")[0]
            if self._jobs.find(job) is None:
                self._deleted.add(job)
        self._wake.set()

    async def run(self) -> None:
        """Delete the maps of deleted jobs, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for job in sorted(self._deleted):
                try:
                    await self._delete_map(job)
                except TwineError as e:  # the next deletion of any job tries again
                    log.info(
                        "shard map of a deleted job not removed", extra={"job": job, "why": str(e)}
                    )

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        if after is None and before is not None:
            self._deleted.add(name)
            self._wake.set()

    async def _delete_map(self, job: str) -> None:
        names = _part_names(job)
        async with self._table.lock(*names):
            record = self._jobs.find(job)  # a new job may have the name
            old_parts = [
                name
                for name in names
                if (part := self._table.find(name)) is not None
                and (record is None or part.created_at != record.created_at)
            ]
            if old_parts:
                await self._table.commit_many(dict.fromkeys(old_parts))
        self._deleted.discard(job)

    async def put(self, job: str, shards: Mapping[str, list[int]]) -> ShardMapView:
        """Replace a job's shard map, whole or not at all; `NotFound` without the job."""
        record = self._jobs.get(job)
        known = {*range(record.spec.tasks), *(task.index for task in record.tasks)}
        wrong = next((s for s, tasks in shards.items() if not known.issuperset(tasks)), "")
        if wrong:
            named = ", ".join(str(task) for task in sorted({*shards[wrong]} - known))
            raise Unprocessable(
                f"shard {wrong} is given to task {named}, and job {job} has no such task",
                hint=f"twinectl job status {job}",
            )
        parts = parts_of(record.created_at, shards)
        names = _part_names(job)
        async with self._table.lock(*names):
            changes = {
                name: parts.get(number)
                for number, name in enumerate(names)
                if parts.get(number) != self._table.find(name)
            }
            if changes:
                await self._table.commit_many(changes)
        return self.view(job)

    def view(self, job: str) -> ShardMapView:
        """Return the shard map of a job; `NotFound` without such a job."""
        record = self._jobs.get(job)
        shards: dict[str, list[int]] = {}
        revision = 0
        for name in _part_names(job):
            part = self._table.find(name)
            if part is not None and part.created_at == record.created_at:
                shards |= part.shards
                revision = max(revision, self._table.revision(name))
        return ShardMapView(job=job, revision=revision, shards=dict(sorted(shards.items())))

    def tasks_of(self, job: str, shard: str) -> list[int] | None:
        """Return the tasks that serve a shard, in order; None if the map lacks it."""
        record = self._jobs.get(job)
        part = self._table.find(_part_names(job)[part_of(shard)])
        if part is None or part.created_at != record.created_at:
            return None
        return part.shards.get(shard)


def _part_names(job: str) -> list[str]:
    return [f"{job}/{number:02d}" for number in range(PARTS)]
