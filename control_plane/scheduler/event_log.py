"""The log of each job: what was done to its tasks, why, from when to when, and how it ended.

Stored in rows of some events, in the transaction that stores the change they tell of. A job
keeps its newest events, also after it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from agent.errors import NotFound
from control_plane.api.jobs import JobRecord
from control_plane.api.operations import EventRow, JobEvent, JobEvents, TaskStory
from control_plane.runtime.job_table import JobTable
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.records import decode, encode, event_row_key, event_rows

ROW = 64
"""Events of one row: 50 KiB with the longest reasons."""
ROWS = 16
"""Rows that a job keeps, with its newest 961 to 1,024 events. If all of them are replaced in the
transaction that writes the largest job whole, that has 93 operations of the 100 it may have."""
PAGE_MAX = 500


class EventLog:
    """Appends to the logs of jobs, and reads them."""

    def __init__(self, store: Store) -> None:
        """Read nothing yet: of a job's log only the last row is kept in memory, once needed."""
        self._store = store
        self._last: dict[str, list[JobEvent]] = {}
        """Job → the events of its last row; none: nothing was ever logged."""

    async def commit(
        self,
        jobs: JobTable,
        record: JobRecord,
        events: Sequence[JobEvent],
        gone: Put | None = None,
    ) -> Sequence[JobEvent]:
        """Store a job with what there is to tell of it; with `gone` instead, the job is deleted.

        Returns the events with their numbers. The caller holds the job's lock.
        """
        name, rows, numbered = record.name, list[Operation](), list[JobEvent]()
        last = self._last.get(name, [])
        if events:
            rows, last, numbered = await self._appended(name, events)
        try:
            after = None if gone is not None else record
            await jobs.commit(name, after, also=[*rows, *([gone] if gone is not None else [])])
        except BaseException:
            self._last.pop(name, None)  # perhaps they are stored: read again
            raise
        if gone is not None:
            self._last.pop(name, None)
        elif events:
            self._last[name] = last
        return numbered

    async def page(self, jobs: JobTable, job: str, after: int, limit: int) -> JobEvents:
        """Return events with a number above `after`, oldest first."""
        events = [event for event in await self._all(jobs, job) if event.seq > after]
        limit = max(1, min(limit, PAGE_MAX))
        return JobEvents(job=job, events=events[:limit], more=len(events) > limit)

    async def story(self, jobs: JobTable, job: str, index: int) -> TaskStory:
        """Return what is known of one task; `NotFound` if nothing is."""
        events = [event for event in await self._all(jobs, job) if event.task == index]
        record = jobs.find(job)
        tasks = record.tasks if record is not None else []
        task = next((task for task in tasks if task.index == index), None)
        if task is None:
            if not events:
                raise NotFound(f"nothing is known of task {index} of job {job!r}")
            return TaskStory(job=job, task=index, events=events)
        return TaskStory(
            job=job,
            task=index,
            phase=task.phase.value,
            machine=task.placement.machine if task.placement is not None else "",
            reason=task.reason,
            now=task.operation,
            events=events,
        )

    async def _all(self, jobs: JobTable, job: str) -> list[JobEvent]:
        rows = await self._rows(job)
        if not rows and jobs.find(job) is None:
            raise NotFound(f"there is no job {job!r}, and no log of one")
        return [event for row in rows for event in row.events]

    async def _rows(self, job: str) -> list[EventRow]:
        listing = await self._store.list_prefix(event_rows(job))
        return [decode(entry.value, EventRow, entry.key) for entry in listing.entries]

    async def _appended(
        self, job: str, events: Sequence[JobEvent]
    ) -> tuple[list[Operation], list[JobEvent], list[JobEvent]]:
        """Return what is written for more events, the last row as it is then, and the events.

        A decision with more events than a log keeps leaves a gap in their numbers.
        """
        if job not in self._last:
            rows = await self._rows(job)
            self._last[job] = rows[-1].events if rows else []
        last = self._last[job]
        seq = last[-1].seq if last else 0
        numbered = [replace(event, seq=seq + n) for n, event in enumerate(events, 1)]
        newest = numbered[-1].seq // ROW
        rows_now: dict[int, list[JobEvent]] = {}
        for event in [*last, *numbered]:
            if event.seq // ROW > newest - ROWS:
                rows_now.setdefault(event.seq // ROW, []).append(event)
        first = seq // ROW
        operations: list[Operation] = [
            Put(event_row_key(job, number), encode(EventRow(events=row)))
            for number, row in rows_now.items()
        ]
        gone = range(max(0, first - ROWS + 1), min(first, newest - ROWS) + 1)
        operations += [Delete(event_row_key(job, n)) for n in gone if n not in rows_now]
        return operations, rows_now[newest], numbered
