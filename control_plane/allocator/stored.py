"""Reads and writes the allocator's records of allocations and decisions.

The decision of a transaction is written with the job's record, in one transaction of the store:
that write is the commit point.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from control_plane.allocator.core.allocation_record import record_after
from control_plane.allocator.core.claims import Change, Claims
from control_plane.allocator.core.request import NO_NEIGHBOURS, NeighbourJobs
from control_plane.api.allocations import AllocationRecord, Decision
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import pages
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.outcomes import Slots, WriteAttempt
from control_plane.store.records import (
    ALLOCATIONS,
    DECISIONS,
    allocation_key,
    decision_key,
    decode,
    encode,
)
from wire.errors import TwineError, UnknownOutcome

log = logging.getLogger(__name__)
_ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """One record with its revision in the store."""

    record: AllocationRecord
    revision: int


class StoredAllocations:
    """Owner of an allocator's records: one per job, and decisions of transactions."""

    def __init__(self, store: Store, name: str, runtime: Runtime) -> None:
        """`name` is the allocator's name."""
        self._store, self._runtime = store, runtime
        self._slots = Slots(store, name)
        self._revisions: dict[str, int] = {}
        self.neighbours: dict[str, NeighbourJobs] = {}
        """Job → the neighbours that its record names."""
        self.done: list[str] = []
        """Decisions that every broker carried out: deleted with the next write."""

    def __contains__(self, job: str) -> bool:
        """Return whether a job has a record."""
        return job in self._revisions

    async def load(
        self, owns: Callable[[str], bool] = lambda _: True
    ) -> AsyncIterator[AllocationRecord]:
        """Yield the records of pools that this allocator owns, while they are read."""
        async for page in pages(self._store, ALLOCATIONS):
            for entry in page:
                record = decode(entry.value, AllocationRecord, entry.key)
                if not owns(record.pool):
                    continue
                self.note(Stored(record, entry.revision))
                yield record

    async def read(self, job: str) -> Stored | None:
        """Return the stored record of a job, if any; changes nothing here."""
        entry = await self._store.get(allocation_key(job))
        if entry is None:
            return None
        return Stored(decode(entry.value, AllocationRecord, entry.key), entry.revision)

    def note(self, stored: Stored) -> None:
        """Take over a record; the next write of this allocator replaces it."""
        self._revisions[stored.record.job] = stored.revision
        record = stored.record
        self._note(record.job, NeighbourJobs(record.apart_from, record.together_with))

    def forget(self, job: str) -> None:
        """Forget a job that now belongs to another allocator."""
        self._revisions.pop(job, None)
        self.neighbours.pop(job, None)

    async def decided(self) -> set[str]:
        """Return the decided transactions, which some brokers may not have carried out yet."""
        listing = await self._store.list_prefix(DECISIONS)
        return {entry.key.removeprefix(DECISIONS) for entry in listing.entries}

    async def write(
        self,
        change: Change,
        claims: Claims | None,
        neighbours: NeighbourJobs,
        transaction: str = "",
    ) -> None:
        """Store the job's next record together with the decision: the commit point."""
        job = change.job
        record = record_after(change, claims, neighbours)
        key = allocation_key(job)
        operations: list[Operation] = [Put(key, encode(record)) if record else Delete(key)]
        if transaction:
            decision = Decision(
                schema=1,
                transaction=transaction,
                job=job,
                machines=[machine.name for machine in change.takes],
            )
            operations.append(Put(decision_key(transaction), encode(decision)))
        done, self.done = self.done, []
        operations += [Delete(decision_key(old)) for old in done]
        before = self._revisions.get(job, 0)
        attempt = WriteAttempt(self._slots, {key: before}, operations)
        try:
            revision = await attempt.make()
        except BaseException as e:
            self.done += done
            if not isinstance(e, UnknownOutcome):
                raise
            revision = await self._outcome(attempt, key)
            if not revision:
                if before:  # finding the outcome may have used up a revision
                    self._revisions[job] = attempt.revision_after(key)
                raise
        if record is None:
            self._revisions.pop(job, None)
        else:
            self._revisions[job] = revision
        self._note(job, neighbours if record is not None else NO_NEIGHBOURS)

    def _note(self, job: str, neighbours: NeighbourJobs) -> None:
        if neighbours == NO_NEIGHBOURS:
            self.neighbours.pop(job, None)
        else:
            self.neighbours[job] = neighbours

    async def _outcome(self, attempt: WriteAttempt, key: str) -> int:
        """Return the revision of a write whose answer was lost; 0 if it will never be made.

        The allocation cannot continue before that, so the store is asked until it answers.
        """
        while True:
            try:
                return await attempt.outcome()
            except TwineError as e:
                log.warning("outcome unknown", extra={"key": key, "reason": str(e)})
                await self._runtime.sleep(_ASK_AGAIN_S)
