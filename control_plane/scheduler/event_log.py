"""The log of each job: the operations on its tasks, with their reason, times and outcome.

Rows of up to 64 events are stored in the transaction that stores the change they describe. A job
keeps its newest events. The 1,000 jobs that were deleted last keep their logs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from control_plane.api.jobs import JobRecord, task_at
from control_plane.api.operations import (
    EventRow,
    GoneJobs,
    JobEvent,
    JobEvents,
    OperationState,
    TaskStory,
)
from control_plane.api.stored_jobs import RetiredJob, read_retired, retired_of
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.table import Checkpoint, ignore_turns
from control_plane.scheduler.core.operations import machine_of
from control_plane.store import Delete, Entry, Operation, Put, Store
from control_plane.store.records import (
    GONE_JOBS,
    RETIRED,
    decode,
    encode,
    event_row_key,
    event_rows,
    retired_key,
)
from wire.errors import NotFound, TwineError

log = logging.getLogger(__name__)
ROW = 64
"""Events of one row: 50 KiB with the longest reasons."""
ROWS = 16
"""Rows that a job keeps, with its newest 961 to 1,024 events. A transaction that replaces all rows
and writes the largest job has 94 operations; the limit is 100."""
PAGE_MAX = 500
GONE_MAX = 1_000
"""Deleted jobs whose logs are kept: up to 1 GB if all of these logs are full."""


class EventLog:
    """Appends to the logs of jobs, and reads them."""

    def __init__(self, store: Store, checkpoint: Checkpoint = ignore_turns) -> None:
        """`checkpoint` is the runtime's."""
        self._store, self._checkpoint = store, checkpoint
        self._last: dict[str, list[JobEvent]] = {}
        """Job → the events of the last row of its log, once needed; the only row in memory."""
        self._has_listed = False
        """Whether deleted jobs that earlier releases did not list were looked up."""
        self._ending = asyncio.Lock()
        """Held while a deleted job is added to the list."""

    async def commit(
        self,
        jobs: JobTable,
        record: JobRecord,
        events: Sequence[JobEvent],
        *,
        is_gone: bool = False,
    ) -> Sequence[JobEvent]:
        """Store a job with its new events; deletes the job instead if it `is_gone`.

        Returns the events with their numbers. The caller holds the job's lock.
        """
        if not is_gone:
            return await self._commit(jobs, record, events, [])
        async with self._ending:
            gone, compare = await self._gone()
            names = [name for name in gone.names if name != record.name]
            gone = replace(gone, names=[*names, record.name])
            last = msgspec.json.encode(retired_of(record))
            with_it = [Put(retired_key(record.name), last), Put(GONE_JOBS, encode(gone))]
            numbered = await self._commit(jobs, record, events, with_it, compare)
            await self._forget_surplus(jobs, gone)
            return numbered

    async def _commit(
        self,
        jobs: JobTable,
        record: JobRecord,
        events: Sequence[JobEvent],
        also: Sequence[Operation],
        compare: Mapping[str, int] | None = None,
    ) -> Sequence[JobEvent]:
        """Store a job; with `compare`, delete it, if the list of deleted jobs is unchanged."""
        is_gone = compare is not None
        name, rows, numbered = record.name, list[Operation](), list[JobEvent]()
        last = self._last.get(name, [])
        if events:
            rows, last, numbered = await self._appended(name, events)
        try:
            await jobs.commit(name, None if is_gone else record, compare, [*rows, *also])
        except BaseException:
            self._last.pop(name, None)  # they may be stored: the next call reads them
            raise
        if is_gone:
            self._last.pop(name, None)
        elif events:
            self._last[name] = last
        return numbered

    def forget(self, job: str) -> None:
        """Drop the cached last row of a job: another process may have written since."""
        self._last.pop(job, None)

    async def _gone(self) -> tuple[GoneJobs, Mapping[str, int]]:
        """Return the list of deleted jobs, and a comparison that holds while the list is unchanged.

        Jobs that earlier releases did not list come first. Other processes may write the list.
        """
        gone, revision = await _gone_jobs(self._store)
        if not self._has_listed:
            kept = (await self._store.list_prefix(RETIRED)).entries
            names = {entry.key.removeprefix(RETIRED) for entry in kept} - {*gone.names}
            gone = replace(gone, names=[*sorted(names), *gone.names])
            self._has_listed = True
        return gone, {GONE_JOBS: revision}

    async def _forget_surplus(self, jobs: JobTable, gone: GoneJobs) -> None:
        """Delete the logs of the jobs that were deleted first, one transaction per job.

        A later job of such a name begins above the highest numbers of all these jobs. A failed
        deletion is retried when the next job is deleted, because the list still has the job.
        """
        while len(gone.names) > GONE_MAX:
            gone, revision = await _gone_jobs(self._store)  # another process may write it
            if len(gone.names) <= GONE_MAX:
                return
            first, names = gone.names[0], gone.names[1:]
            rows = list[Entry]()
            if jobs.find(first) is None:  # else the log is that of a new job with this name
                rows += (await self._store.list_prefix(event_rows(first))).entries
            entry = await self._store.get(retired_key(first))
            last = RetiredJob() if entry is None else read_retired(entry.value)
            rows += [] if entry is None else [entry]
            gone = replace(
                gone,
                names=names,
                generation=max(gone.generation, last.generation),
                asked=max(gone.asked, last.asked),
            )
            operations: list[Operation] = [Delete(row.key) for row in rows]
            operations.append(Put(GONE_JOBS, encode(gone)))
            try:
                compare = {row.key: row.revision for row in rows} | {GONE_JOBS: revision}
                await self._store.txn(compare, operations)
            except TwineError as e:
                log.info("log of a deleted job not removed", extra={"job": first, "reason": str(e)})
                return

    async def page(self, jobs: JobTable, job: str, after: int, limit: int) -> JobEvents:
        """Return events with a number above `after`, oldest first."""
        limit, events = max(1, min(limit, PAGE_MAX)), list[JobEvent]()
        for row in await self._rows(jobs, job, after, limit):
            events += [event for event in row.events if event.seq > after]
        return JobEvents(job=job, events=events[:limit], more=len(events) > limit)

    async def story(self, jobs: JobTable, job: str, index: int) -> TaskStory:
        """Return the state and the events of one task, or raise `NotFound`.

        Failed updates of the job are included, because they caused the task's rollback.
        """
        known = [event for row in await self._rows(jobs, job) for event in row.events]
        is_known = any(event.task == index for event in known)
        events = [event for event in known if event.task == index or _is_failed_update(event)]
        record = jobs.find(job)
        task = task_at(record, index) if record is not None else None
        if task is None:
            if not is_known:
                raise NotFound(f"there are no events of task {index} of job {job!r}")
            return TaskStory(job=job, task=index, events=events)
        return TaskStory(
            job=job,
            task=index,
            phase=task.phase.value,
            machine=machine_of(task),
            reason=task.reason,
            restarts=task.restarts,
            last_exit=task.last_exit,
            now=task.operation,
            events=events,
        )

    async def _rows(
        self, jobs: JobTable, job: str, after: int = 0, most: int = ROW * ROWS
    ) -> list[EventRow]:
        """Return the rows with the first `most` events after a number, and one more event."""
        first = max(0, after) // ROW
        begin = event_row_key(job, first - 1) if first else ""
        entries = (await self._store.list_prefix(event_rows(job), begin)).entries
        if not entries and jobs.find(job) is None:
            any_row = await self._store.list_prefix(event_rows(job), limit=1)
            if not any_row.entries:
                raise NotFound(f"there is no job {job!r}, and no log of one")
        rows, count = list[EventRow](), 0
        for entry in entries:
            await self._checkpoint()
            rows.append(decode(entry.value, EventRow, entry.key))
            count += sum(event.seq > after for event in rows[-1].events)
            if count > most:
                break
        return rows

    async def _appended(
        self, job: str, events: Sequence[JobEvent]
    ) -> tuple[list[Operation], list[JobEvent], list[JobEvent]]:
        """Return the writes for new events, the new last row, and the numbered events.

        A decision with more events than a log keeps leaves a gap in their numbers.
        """
        if job not in self._last:
            entries = (await self._store.list_prefix(event_rows(job))).entries
            rows = [decode(last.value, EventRow, last.key).events for last in entries[-1:]]
            self._last[job] = rows[0] if rows else []
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


def _is_failed_update(event: JobEvent) -> bool:
    return event.task is None and event.outcome is OperationState.FAILED


async def retired_job(store: Store, name: str) -> RetiredJob:
    """Return the numbers that a new job continues from earlier jobs of its name.

    The entry of the name is read first. Once it is deleted, the highest numbers of all deleted
    jobs apply.
    """
    entry = await store.get(retired_key(name))
    if entry is not None:
        return read_retired(entry.value)
    gone, _ = await _gone_jobs(store)
    return RetiredJob(generation=gone.generation, asked=gone.asked)


async def _gone_jobs(store: Store) -> tuple[GoneJobs, int]:
    """Return the list of deleted jobs, and its revision."""
    entry = await store.get(GONE_JOBS)
    if entry is None:
        return GoneJobs(), 0
    return decode(entry.value, GoneJobs, entry.key), entry.revision
