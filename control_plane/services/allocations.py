"""Allocations of a region: planned on the index, durable in one record per job.

    plan -> reserve in memory -> hold free machines at their brokers   (first phase)
         -> store the job's record, and the decision with it           (the commit point)
         -> brokers assign what they held                              (second phase)

Results are cached per job: a request that says the same as the last one is answered from the
claims themselves, unless something about one of the job's machines changed (paper §2.3).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from agent.errors import Busy, Conflict, TwineError
from control_plane.api.allocations import AllocationRecord, Decision, StoredDemand
from control_plane.core.feasibility import Demand
from control_plane.core.machine_pools import Machine
from control_plane.core.planner import Allowance, Plan, Request, planning
from control_plane.core.region_index import Change, Claim, Claims, RegionIndex
from control_plane.services.holds import Take
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.records import (
    ALLOCATIONS,
    DECISIONS,
    allocation_key,
    decision_key,
    decode,
    encode,
)

log = logging.getLogger(__name__)
ATTEMPTS = 10
"""Plans that are made for one request before it fails as busy."""
PAGE = 2_000
_CLOSE_S = 1.0
T = TypeVar("T")


class Participants(Protocol):
    """The brokers, as two-phase commit sees them."""

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all these machines, or none and raise `Conflict`."""
        ...

    async def commit(self, transaction: str) -> object:
        """Assign what the transaction holds; again changes nothing."""
        ...

    async def abort(self, transaction: str) -> None:
        """Let go of what the transaction holds; again changes nothing."""
        ...

    def in_doubt(self) -> Mapping[str, object]:
        """Return the transactions that hold machines."""
        ...


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to a request: where the job's tasks are, and why some are nowhere."""

    claims: Claims | None
    """Of all tasks that have a machine; None: no task has. Belongs to the index."""
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class _Result:
    """What was answered last, and to what."""

    request: Request
    allocation: Allocation
    gain: int


@dataclass(slots=True)
class Counts:
    """What happened since the start, for metrics and benchmarks."""

    hits: int = 0
    misses: int = 0
    conflicts: int = 0
    stored: int = 0
    taken: int = 0
    """Machines taken from the free pool."""
    cpu_s: float = 0.0
    """Computing time of plans and reservations (AL24)."""


class Allocations:
    """Owner of all allocation records; `index` holds the same in memory, and the machines."""

    def __init__(
        self,
        store: Store,
        index: RegionIndex,
        participants: Participants,
        refresh: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        """Know nothing yet; `refresh(machines)` brings the index up to date with the brokers."""
        self.index = index
        self._refresh = refresh
        self.counts = Counts()
        self._store = store
        self._participants = participants
        self._results: dict[str, _Result] = {}
        self._revisions: dict[str, int] = {}
        self._busy: dict[str, asyncio.Event] = {}
        self._emptied: list[Callable[[list[Machine]], None]] = []
        self._work: set[asyncio.Future[Allocation]] = set()
        """What is under way, whether or not anybody still waits for it."""
        self._done: list[str] = []
        """Decisions that every broker carried out: deleted with the next write."""
        self._number = 0

    def listen(self, emptied: Callable[[list[Machine]], None]) -> None:
        """Call `emptied(machines)` when an allocation leaves machines without tasks."""
        self._emptied.append(emptied)

    async def close(self) -> None:
        """Let what is under way end; what does not is found half done by `recover`."""
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_CLOSE_S)
            for work in late:
                work.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # -- restart

    async def load(self) -> None:
        """Read all records; the index must hold the machines already."""
        after = ""
        while True:
            listing = await self._store.list_prefix(ALLOCATIONS, after, PAGE)
            for entry in listing.entries:
                record = decode(entry.value, AllocationRecord, entry.key)
                self._revisions[record.job] = entry.revision
                self._restore(record)
            if len(listing.entries) < PAGE:
                return
            after = listing.entries[-1].key
            await asyncio.sleep(0)

    async def recover(self) -> None:
        """Finish what a crash interrupted: commit what was decided, abort everything else."""
        listing = await self._store.list_prefix(DECISIONS)
        decided = {e.key.removeprefix(DECISIONS) for e in listing.entries}
        for transaction in list(self._participants.in_doubt()):
            if transaction in decided:
                await self._participants.commit(transaction)
            else:
                await self._participants.abort(transaction)
            log.info(
                "transaction recovered",
                extra={"transaction": transaction, "committed": transaction in decided},
            )
        self._done += sorted(decided)

    def _restore(self, record: AllocationRecord) -> None:
        demands = [_demand(stored) for stored in record.demands]
        claims = []
        for task, name in enumerate(record.machines):
            machine = self.index.machines.get(name) if name else None
            if machine is None:
                continue
            demand = demands[record.demand_of[task] if record.demand_of else 0]
            claims.append(Claim(task, machine, demand, record.ports.get(task)))
        self.index.restore(record.job, record.pool, claims)

    # -- allocating

    async def allocate(
        self, request: Request, allowance: Callable[[], Allowance], profile: str = ""
    ) -> Allocation:
        """Do what a request asks for; when this returns, it survives any crash.

        Tasks that have room nowhere are in the answer, with all reasons. `Busy` if other
        allocations were faster again and again; then, and on any other error, nothing
        changed.
        """
        known = self._results.get(request.job)
        if known is not None and known.request == request and self._holds(known):
            self.counts.hits += 1
            return known.allocation
        self.counts.misses += 1
        while (busy := self._busy.get(request.job)) is not None:
            await busy.wait()
        self._busy[request.job] = done = asyncio.Event()
        work = asyncio.ensure_future(self._allocate(request, allowance, profile))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            return await asyncio.shield(work)  # once begun, it ends: nobody is half allocated
        finally:
            if work.done():
                self._free(request.job, done)
            else:
                work.add_done_callback(lambda _: self._free(request.job, done))

    def _free(self, job: str, done: asyncio.Event) -> None:
        self._busy.pop(job, None)
        done.set()

    def _holds(self, known: _Result) -> bool:
        """Return whether a fresh computation would say the same as this result."""
        claims = self.index.claims.get(known.request.job)
        if claims is not known.allocation.claims or (claims is not None and not claims.valid):
            return False
        return not known.allocation.unplaced or known.gain == self.index.gain

    async def _allocate(
        self, request: Request, allowance: Callable[[], Allowance], profile: str
    ) -> Allocation:
        for _ in range(ATTEMPTS):
            claims = self.index.claims.get(request.job)
            if claims is not None:
                claims.valid = True  # what changes from here on makes it false again
            made = await self._in_steps(planning(self.index, request, allowance()))
            change = made.change
            if change.is_empty:
                return self._remember(request, made)
            if await self._in_steps(self.index.reserving(change)):
                self.counts.conflicts += 1
                await asyncio.sleep(0)
                continue
            try:
                await self._commit(change, profile)
            except Conflict as e:
                self.counts.conflicts += 1
                self.index.rollback(change)
                self._refresh(error.field for error in e.errors)
                continue
            except BaseException:
                self.index.rollback(change)
                raise
            emptied = await self._in_steps(self.index.settling(change))
            if emptied:
                for heard in self._emptied:
                    heard(emptied)
            return self._remember(request, made)
        raise Busy(
            f"cannot allocate job {request.job!r}: its machines went to others"
            f" {ATTEMPTS} times in a row",
            hint="it is tried again",
        )

    async def _in_steps(self, work: Generator[None, None, T]) -> T:
        """Run a generator to its end, letting others run between its steps."""
        while True:
            began = time.perf_counter()
            try:
                next(work)
            except StopIteration as stop:
                value: T = stop.value
                return value
            finally:
                self.counts.cpu_s += time.perf_counter() - began
            await asyncio.sleep(0)

    def _remember(self, request: Request, made: Plan) -> Allocation:
        claims = self.index.claims.get(request.job)
        allocation = Allocation(claims, made.unplaced, made.reasons)
        if request.groups:
            self._results[request.job] = _Result(request, allocation, made.gain)
        else:
            self._results.pop(request.job, None)
        return allocation

    async def _commit(self, change: Change, profile: str) -> None:
        """Make a reserved change durable, in two phases if it takes machines."""
        if not change.takes:
            await self._write(change, "")
            return
        self._number += 1
        transaction = f"{self._store.epoch()}-{self._number}"
        takes = {machine.name: Take(change.pool, profile) for machine in change.takes}
        try:
            await self._participants.prepare(transaction, takes)
            await self._write(change, transaction)
        except Exception:
            await self._abort(transaction)
            raise
        self.counts.taken += len(takes)
        await self._second_phase(transaction)

    async def _abort(self, transaction: str) -> None:
        try:
            await self._participants.abort(transaction)
        except TwineError as e:  # found again by `recover`
            log.warning("holds remain", extra={"transaction": transaction, "reason": str(e)})

    async def _second_phase(self, transaction: str) -> None:
        """Tell the brokers; one that does not answer is told again, until it does."""
        pause_s = 0.05
        while True:
            try:
                await self._participants.commit(transaction)
            except TwineError as e:
                log.warning(
                    "assignment delayed", extra={"transaction": transaction, "reason": str(e)}
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
            else:
                self._done.append(transaction)
                return

    async def _write(self, change: Change, transaction: str) -> None:
        """Store the job's record as it will be, with the decision: the commit point."""
        job = change.job
        record = _record_after(change, self.index.claims.get(job))
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
        done, self._done = self._done, []
        operations += [Delete(decision_key(old)) for old in done]
        try:
            revision = await self._store.txn({key: self._revisions.get(job, 0)}, operations)
        except BaseException:
            self._done += done
            raise
        self.counts.stored += 1
        if record is None:
            self._revisions.pop(job, None)
        else:
            self._revisions[job] = revision


def _record_after(change: Change, claims: Claims | None) -> AllocationRecord | None:
    """Return the record of a job after a change that is reserved and not yet settled."""
    machines: list[str] = []
    demands: dict[Demand, int] = {}
    demand_of: list[int] = []
    ports: dict[int, dict[str, int]] = {}
    gone = {claim.task for claim in change.freed}
    stay = [claim for claim in claims or () if claim.task not in gone]
    for claim in (*stay, *change.claims):
        task = claim.task
        missing = task + 1 - len(machines)
        if missing > 0:
            machines.extend([""] * missing)
            demand_of.extend([0] * missing)
        machines[task] = claim.machine.name
        demand_of[task] = demands.setdefault(claim.demand, len(demands))
        if claim.ports:
            ports[task] = claim.ports
    if not machines:
        return None
    return AllocationRecord(
        schema=1,
        job=change.job,
        pool=change.pool,
        machines=machines,
        demands=[_stored(demand) for demand in demands],
        demand_of=demand_of if len(demands) > 1 else [],
        ports=ports,
    )


def _stored(demand: Demand) -> StoredDemand:
    return StoredDemand(
        memory_bytes=demand.memory_bytes,
        cpus=demand.cpus,
        rru=demand.rru,
        gpus=demand.gpus,
        network_mbps=demand.network_mbps,
        ports=demand.ports,
        requires=tuple((p, tuple(sorted(values))) for p, values in demand.requires),
    )


def _demand(stored: StoredDemand) -> Demand:
    return Demand(
        memory_bytes=stored.memory_bytes,
        cpus=stored.cpus,
        rru=stored.rru,
        gpus=stored.gpus,
        network_mbps=stored.network_mbps,
        ports=stored.ports,
        requires=tuple((p, frozenset(values)) for p, values in stored.requires),
    )
