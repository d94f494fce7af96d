"""Allocations of a region: planned on the index, durable in one record per job.

    plan -> reserve in memory, where quotas and promises are checked again
         -> hold free machines at their brokers                        (first phase)
         -> store the job's record together with the decision          (the commit point)
         -> brokers assign the held machines                           (second phase)

Results are cached per job: a request that equals the last one is answered from the claims, unless
one of the job's machines changed (paper §2.3).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from control_plane.agents.ports import KnownMachines
from control_plane.allocator.commit import Commits
from control_plane.allocator.core.allocation_record import restoring
from control_plane.allocator.core.claims import Change
from control_plane.allocator.core.commit import (
    PendingRequest,
    move_back_change,
    move_claims_back,
    without_terms,
)
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import (
    NO_NEIGHBOURS,
    Allocation,
    Allowance,
    NeighbourJobs,
    Plan,
    Request,
)
from control_plane.allocator.stored import StoredAllocations
from control_plane.allocator.turns import JobTurns
from control_plane.broker.holds import Take
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from wire.errors import Busy, Conflict, NotFound

log = logging.getLogger(__name__)
ATTEMPTS = 10
"""Plans that are made for one request before it fails as busy."""
STEP = 2_000
"""Tasks that are read between two turns of the event loop."""
_IN_ADVANCE = "+"
"""Prefix of the job name under which a machine is taken before it has tasks; no job has it."""
T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """Counts since the start, for metrics and benchmarks."""

    hits: int = 0
    misses: int = 0
    conflicts: int = 0
    stored: int = 0
    taken: int = 0
    """Machines taken from the free pool."""
    cpu_s: float = 0.0
    """Seconds in the steps of plans and reservations, which compute and never wait (AL24)."""


class Allocations:
    """Owner of all allocation records; `index` holds the same in memory, and the machines."""

    def __init__(
        self,
        store: Store,
        index: RegionIndex,
        participants: KnownMachines,
        refresh: Callable[[Iterable[str]], None] = lambda _: None,
        name: str = "allocator",
        runtime: Runtime | None = None,
    ) -> None:
        """`refresh(machines)` brings the index up to date with the brokers.

        `name` marks the transactions of this allocator at brokers that several share.
        """
        self.index = index
        self._name = name
        self._refresh = refresh
        self.counts = Counts()
        self.is_ours: Callable[[str], bool] = lambda name: name.startswith(f"{self._name}:")
        """Returns whether this allocator must finish a transaction."""
        self._store = store
        self._runtime = runtime or Runtime()
        self._participants = participants
        self._commits = Commits(participants, self._runtime)
        self.stored = StoredAllocations(store, name, self._runtime)
        self._answers: dict[str, tuple[Request, Allocation]] = {}
        """Job → its last request, and the answer."""
        self._turns = JobTurns()
        self._being_taken: dict[Machine, asyncio.Event] = {}
        """Machine that is being taken → event that is set when that has ended."""
        self._assigning: dict[str, str] = {}
        """Machine that was taken → its transaction, until all brokers have acknowledged it."""
        self.taking: Callable[[list[Machine], str], None] = lambda *_: None
        """Called in the step that takes machines for a pool."""
        self.taken: Callable[[list[Machine]], None] = lambda _: None
        """Called when the brokers have assigned these machines, or the allocation has failed."""
        self.confirm: Callable[[list[Machine], str], Awaitable[bool]] | None = None
        """Called when brokers hold machines for a pool; returns whether it may still have them."""
        self._listeners: list[Callable[[list[Machine]], None]] = []
        self._number = 0

    def listen(self, on_emptied: Callable[[list[Machine]], None]) -> None:
        """Call `on_emptied(machines)` when an allocation leaves machines without tasks."""
        self._listeners.append(on_emptied)

    async def close(self) -> None:
        """Wait for running work for a moment; `recover` finishes the rest at the next start."""
        await self._turns.close()
        await self._commits.close()

    # -- restart

    async def load(self, owns: Callable[[str], bool] = lambda _: True) -> None:
        """Read the records of this allocator's pools; the index must have the machines."""
        restored = 0
        async for record in self.stored.load(owns):
            for tasks in restoring(record, self.index, STEP):
                restored += tasks
                if restored >= STEP:
                    restored = 0
                    await asyncio.sleep(0)

    async def recover(self) -> None:
        """Finish transactions that a crash interrupted: commit decided ones, abort the others.

        Other allocators finish their own transactions.
        """
        decided = {name for name in await self.stored.decided() if self.is_ours(name)}
        for transaction in list(self._participants.in_doubt()):
            if not self.is_ours(transaction):
                continue
            if transaction in decided:
                await self._participants.commit(transaction)
            else:
                await self._participants.abort(transaction)
            fields = {"transaction": transaction, "committed": transaction in decided}
            log.info("transaction recovered", extra=fields)
        self.stored.done += sorted(decided)

    # -- allocating

    async def allocate(
        self,
        request: Request,
        allowance: Callable[[], Allowance],
        profile: str = "",
        with_terms: Callable[[Request], Request] = without_terms,
    ) -> Allocation:
        """Carry out a request; when this returns, the result survives any crash.

        `bound(request)` adds the terms that follow from other jobs. It and `allowance` are called
        for each plan and at each commit. The answer has the tasks without room, with all reasons.
        Raises `Busy` if other allocations were faster at every attempt. After any error nothing has
        changed.
        """
        if (known := self.known(with_terms(request))) is not None:
            return known
        self.counts.misses += 1
        pending = PendingRequest(request, allowance, profile, with_terms)
        return await self._turns.run(request.job, lambda: self._allocate(pending))

    async def take(
        self, machine: str, pool: str, allowance: Callable[[], Allowance], profile: str
    ) -> bool:
        """Take a free machine for a pool before it has tasks; return whether that succeeded.

        The limits and the durability are those of allocations.
        """
        found = self.index.machines.get(machine)
        if found is None:
            return False
        change = Change(_IN_ADVANCE + machine, pool, takes=[found])
        pending = PendingRequest(Request(change.job, pool), allowance, profile)
        return await self._turns.run(change.job, lambda: self._carry_out(change, pending))

    def known(self, request: Request) -> Allocation | None:
        """Return the last answer if its request was the same and it still holds."""
        pending, answer = self._answers.get(request.job, (None, None))
        if pending != request or answer is None or not self._is_current(request, answer):
            return None
        self.counts.hits += 1
        return answer

    def forget_answer(self, job: str) -> None:
        """Plan the next request of a job again, even if it is the same as the last."""
        self._answers.pop(job, None)

    def _is_current(self, request: Request, answer: Allocation) -> bool:
        """Return whether a new computation would give the same answer."""
        claims = self.index.claims.get(request.job)
        if claims is not answer.claims or (claims is not None and not claims.valid):
            return False
        return not answer.unplaced or answer.gain == self.index.gains(request.pool)

    async def _allocate(self, pending: PendingRequest) -> Allocation:
        job = pending.request.job
        self._answers.pop(job, None)  # after a failure the old answer is not valid
        if pending.request.unmoved:
            await self._move_back(pending.request)
            pending = replace(pending, request=replace(pending.request, unmoved=()))
        for _ in range(ATTEMPTS):
            await self._runtime.checkpoint()
            claims = self.index.claims.get(job)
            if claims is not None:
                claims.valid = True  # later changes of its machines set it to false again
            request = pending.with_terms(pending.request)
            made = await self.in_steps(planning(self.index, request, pending.allowance()))
            change = made.change
            if change.is_empty:
                await self._store_neighbours(request)
            elif not await self._carry_out(change, pending):
                self.counts.conflicts += 1
                await asyncio.sleep(0)
                continue
            return self._remember(request, made)
        raise Busy(
            f"cannot allocate job {job!r}: other jobs took its machines, or the rest of its "
            f"entitlement, {ATTEMPTS} times in a row",
            hint="it is retried",
        )

    async def _store_neighbours(self, request: Request) -> None:
        """Store the neighbours that a job names now, if nothing else of its allocation changes."""
        known = self.stored.neighbours.get(request.job, NO_NEIGHBOURS)
        if request.job in self.stored and request.neighbours != known:
            await self._write(Change(request.job, request.pool), request.neighbours)

    async def _move_back(self, request: Request) -> None:
        """Move claims back to the machines where tasks still are, whether or not they fit there.

        The index changes after the store, so a restart reads the same.
        """
        claims = self.index.claims.get(request.job)
        change = move_back_change(request, claims, self.index.machines)
        if claims is None or not change.claims:
            return
        await self._write(change, request.neighbours)
        self._report_emptied(move_claims_back(self.index, change))

    async def _carry_out(self, change: Change, pending: PendingRequest) -> bool:
        """Carry out a plan durably; return False if another allocation was faster."""
        earlier_takes = [
            work for claim in change.claims if (work := self._being_taken.get(claim.machine))
        ]
        done = asyncio.Event()
        for machine in change.takes:
            self._being_taken.setdefault(machine, done)
        is_decided, announced = False, list[Machine]()
        try:
            judged = partial(self._check_and_announce, pending, change, announced)
            if await self.in_steps(self.index.reserving(change, judged)):
                return False
            transaction = await self._decide_after(earlier_takes, change, pending)
            if transaction is None:
                return False
            is_decided = True
            for machine in change.takes:
                self._assigning[machine.name] = transaction
            emptied = await self.in_steps(self.index.settling(change))
        finally:
            for machine in change.takes:
                if self._being_taken.get(machine) is done:
                    del self._being_taken[machine]
            done.set()
            if change.takes and not is_decided:
                self.taken(announced)
                self._refresh([machine.name for machine in change.takes])
        if transaction:
            await self._commits.commit(transaction, lambda: self._assigned(change, transaction))
        self._report_emptied(emptied)
        return True

    def _check_and_announce(
        self, pending: PendingRequest, change: Change, announced: list[Machine]
    ) -> list[str]:
        """Return the machines that a change may not have; if there are none, announce its takes."""
        refused = pending.refused_machines(change)
        if change.takes and not refused:
            self.taking(change.takes, change.pool)
            announced += change.takes
        return refused

    def _report_emptied(self, machines: list[Machine]) -> None:
        if machines:
            for on_emptied in self._listeners:
                on_emptied(machines)

    def _assigned(self, change: Change, transaction: str) -> None:
        """Finish a transaction after all brokers have acknowledged its decision."""
        self.stored.done.append(transaction)
        for machine in change.takes:
            self._assigning.pop(machine.name, None)
        self.index.end_taking(change)
        self.taken(change.takes)
        self._refresh([machine.name for machine in change.takes])

    async def _decide_after(
        self, earlier_takes: list[asyncio.Event], change: Change, pending: PendingRequest
    ) -> str | None:
        """Decide a reserved change once the changes that take the same machines have ended.

        Return its transaction. Return None if others were faster; then nothing is reserved.
        """
        try:
            for work in earlier_takes:  # they may fail to get these machines
                await work.wait()
            if all(claim.machine.pool == change.pool for claim in change.claims):
                return await self._decide(change, pending)
        except (Conflict, NotFound):
            pass
        except BaseException:
            self.index.rollback(change)
            raise
        self.index.rollback(change)
        return None

    def is_under_way(self, jobs: Iterable[str]) -> bool:
        """Return whether an allocation of one of these jobs runs, or machines are being taken."""
        running = self._turns.running
        in_advance = any(name.startswith(_IN_ADVANCE) for name in running)
        return bool(self._assigning) or in_advance or any(job in running for job in jobs)

    def is_taking(self, machine: str) -> bool:
        """Return whether a running allocation is taking a machine."""
        found = self.index.machines.get(machine)
        return machine in self._assigning or (found is not None and found in self._being_taken)

    async def in_steps(self, work: Generator[None, None, T]) -> T:
        """Run a generator to its end, with a checkpoint of the loop between its steps."""
        while True:
            began = time.perf_counter()  # the thread's CPU time would need a system call
            try:
                next(work)
            except StopIteration as stop:
                value: T = stop.value
                return value
            finally:
                self.counts.cpu_s += time.perf_counter() - began
            await self._runtime.checkpoint()

    def _remember(self, request: Request, made: Plan) -> Allocation:
        claims = self.index.claims.get(request.job)
        if claims is not None:
            claims.needs_usable = not all(group.running for group in request.groups)
        allocation = Allocation(claims, made.unplaced, made.reasons, made.gain)
        if request.groups:
            self._answers[request.job] = request, allocation
        return allocation

    async def _decide(self, change: Change, pending: PendingRequest) -> str:
        """Make a reserved change durable, after its brokers hold the machines that it takes.

        Return the transaction whose second phase must follow; empty if it takes no machines.
        """
        if not change.takes:
            await self._write(change, pending.request.neighbours)
            return ""
        self._number += 1
        transaction = f"{self._name}:{self._store.epoch()}-{self._number}"
        takes = {machine.name: Take(change.pool, pending.profile) for machine in change.takes}
        try:
            await self._commits.prepare(transaction, takes)
            if self.confirm is not None and not await self.confirm(change.takes, change.pool):
                raise Conflict(f"cannot take {len(takes)} machines: they are promised to others")
            await self._write(change, pending.request.neighbours, transaction)
        except Exception:
            await self._commits.abort(transaction)
            raise
        self.counts.taken += len(takes)
        return transaction

    async def _write(
        self, change: Change, neighbours: NeighbourJobs, transaction: str = ""
    ) -> None:
        await self.stored.write(change, self.index.claims.get(change.job), neighbours, transaction)
        self.counts.stored += 1
