"""Runs the shards of this process, and moves entitlements between them.

A shard is a scheduler with its allocator. All shards share the brokers, jobs, portal and
dispatcher. A shard decides only about the entitlements that the ownership map gives it
(docs/adr/0152).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from agent.api import TaskSpec
from control_plane.agents.core.commands import Stop
from control_plane.agents.region import Region
from control_plane.allocator import handover
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.pool_keeper import PoolKeeper
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.ownership import ShardMoved
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.portal.core.pools import pool_of
from control_plane.portal.portal import Portal
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.loops import AfterFailure, Loops
from control_plane.scheduler.job_planner import JobPlanner
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shard_lookup import RunningShard, ShardLookup, ShardParts
from control_plane.shards.core.scopes import least_loaded_first
from control_plane.shards.ownership import SHARDS_MAX, OwnershipMap
from control_plane.store import Store
from wire.errors import Busy, Conflict, NotFound, TwineError

log = logging.getLogger(__name__)
IDLE_S, _PAUSE_S = 10.0, 0.01
"""Seconds that a move waits for work under way in its entitlement, and between two checks."""
_SETTLE_S = 1.0
"""Seconds between two attempts to read whether the new owner was written."""
ALLOCATOR = "allocator"
"""Name of shard 0's allocator, and of the only allocator of earlier releases."""


class RunningShards(ShardLookup):
    """The shards of this process; each call goes to the shard that owns its object."""

    def __init__(
        self, parts: ShardParts, ownership: OwnershipMap, allocators: Mapping[int, Allocator]
    ):
        """Create a shard for each allocator of `allocators_of`; `start` starts their loops."""
        shards = {number: _make_shard(number, parts, of) for number, of in allocators.items()}
        super().__init__(parts, ownership, shards)
        self._moves = asyncio.Lock()
        parts.dispatcher.wanted = self._command_for
        parts.control.in_one_shard = self.in_one_shard
        parts.portal.in_scope = self.scopes.check_change

    def check_map(self) -> None:
        """Raise `ConfigError` if the map of owners contradicts the settings."""
        self._ownership.check(self.count, self._parts.portal.table)
        self.scopes.check_owners()

    async def is_ready(self, shard: int) -> bool:
        """Return whether a shard accepts requests; the shards of this process do."""
        return shard in self._by_number

    async def assign_unused(self, entitlement: str) -> None:
        """Give an unused entitlement to the least loaded shard that is ready."""
        record = self._parts.portal.table.find(entitlement)
        if self.count == 1 or record is None:
            return
        pool = pool_of(entitlement, record.spec)
        machines = self._parts.region.broker.count(pool)
        if self._has_shard(pool, machines, self._members(pool)):
            return
        for shard in least_loaded_first(self.loads(), self.scopes.pin_of(pool)):
            if await self.is_ready(shard):
                await self._ownership.give(pool, shard, self.scopes.check_new_owner(pool, shard))
                return

    async def move(self, pool: str, to: int, *, dry_run: bool = False) -> ShardMoved:
        """Move an entitlement to another shard; no task restarts.

        The old shard begins no new operations. Once the present ones have ended, the new shard
        reads the records. The write of the new owner is the commit point. Raises `Busy`, without a
        change, if an operation does not end in time. A process that crashes at any step starts
        again with the owner in the map.
        """
        self._check_target(pool, to)
        source, jobs = self._ownership.shard_of(pool), self.jobs_in(pool)
        self._check_no_transfer(pool, jobs)
        machines = len(self._parts.region.broker.held(pool))
        moves = source != to and not dry_run
        if moves:
            async with self._moves:
                work = self._move_or_error(pool, to)  # completes even if the client disconnects
                task = self._parts.region.runtime.spawn("shard move", work)
                if (error := await asyncio.shield(task)) is not None:
                    raise error
            log.info("entitlement moved", extra={"entitlement": pool, "shard": to})
        return ShardMoved(
            entitlement=pool,
            from_shard=source,
            to_shard=to,
            jobs=jobs,
            machines=machines,
            done=moves,
        )

    async def _move_or_error(self, pool: str, to: int) -> TwineError | None:
        """Move, and return the error: an error that a spawned task raises ends the process."""
        try:
            await self._move(pool, to)
        except TwineError as e:
            return e
        return None

    async def _move(self, pool: str, to: int) -> None:
        source, target = self.of_pool(pool), self._require_shard(to)
        self._ownership.moving[pool] = target.number  # from now on no shard owns it
        try:
            await self._wait_written(pool)
            async with self._parts.jobs.lock(*self.jobs_in(pool)):
                jobs = self.jobs_in(pool)
                self._check_no_transfer(pool, jobs)  # a transfer may have begun before the locks
                await self._wait_idle(pool, source, jobs)
                stored = await handover.read(target.allocator, jobs)
                await self._write_owner(pool, target.number)
                if self._ownership.shard_of(pool) == target.number:
                    handover.drop(source.allocator, jobs)
                    handover.adopt(target.allocator, pool, stored)
        finally:
            del self._ownership.moving[pool]
            for job in self.jobs_in(pool):
                source.scheduler.forget(job)
            self._wake(pool)

    def _wake(self, pool: str) -> None:
        """Wake the new owner's work on the jobs and machines of a pool after a move."""
        owner = self.find_pool(pool)
        if owner is not None:
            for job in self.jobs_in(pool):
                owner.scheduler.wake(job)
            owner.keeper.watch_pool(pool)

    async def _wait_written(self, pool: str) -> None:
        """Return once all jobs that were being written into a pool are in the table (BUG-CP61).

        Such a job may be in transfer from another entitlement.
        """
        portal, names = self._parts.portal, self._members(pool)
        await self._wait_while(pool, "the write of a job", lambda: portal.is_applying(names))
        await self._parts.jobs.settle()

    async def _wait_idle(self, pool: str, source: RunningShard, jobs: list[str]) -> None:
        allocator, asking = source.allocator, source.scheduler.requests.asking

        def is_busy() -> bool:
            return not asking.isdisjoint(jobs) or handover.is_busy(allocator, pool, jobs)

        await self._wait_while(pool, "an allocation", is_busy)

    async def _wait_while(self, pool: str, what: str, is_busy: Callable[[], bool]) -> None:
        runtime = self._parts.region.runtime
        ends = runtime.now() + IDLE_S
        while is_busy():
            if runtime.now() >= ends:
                raise Busy(
                    f"cannot move entitlement {pool!r}: {what} in it takes more than "
                    f"{IDLE_S:g} s; nothing was changed",
                    hint="try again; `twinectl status` names the store that does not answer",
                )
            await runtime.sleep(_PAUSE_S)

    async def _write_owner(self, pool: str, shard: int) -> None:
        """Write the new owner, or raise; after an unknown outcome, reads whether it was written."""
        try:
            await self._ownership.move(pool, shard, self.scopes.check_new_owner(pool, shard))
        except Conflict:
            raise
        except TwineError as e:
            log.warning("owner not written", extra={"entitlement": pool, "reason": str(e)})
            while True:
                try:
                    await self._ownership.table.settle()
                except TwineError:
                    await self._parts.region.runtime.sleep(_SETTLE_S)
                else:
                    break
            if self._ownership.shard_of(pool) != shard:
                raise

    def _check_target(self, pool: str, to: int) -> None:
        specs = self._parts.portal.specs()
        if pool not in specs:
            raise NotFound(f"there is no entitlement {pool!r}", hint="twinectl entitlement list")
        if specs[pool].materialization:
            raise Conflict(
                f"cannot move entitlement {pool!r}: it shares the machines of"
                f" {specs[pool].materialization!r}, and its shard",
                hint=f"twinectl shard move {specs[pool].materialization} --to {to}",
            )
        if to >= self.count:
            raise NotFound(f"there is no shard {to}: they are 0 to {self.count - 1}")
        self.scopes.check_new_owner(pool, to)

    # -- calls about one shard

    async def plan(self, spec: JobSpec, writer: str = "") -> JobPlan:
        """Return the effects of applying a job; see `JobPlanner`."""
        return await self.of_entitlement(spec.entitlement).planner.plan(spec, writer)

    async def explain(self, name: str) -> JobExplanation:
        """Return why tasks of a job have no machine; see `JobPlanner`."""
        return await self.of_job(name).planner.explain(name)

    def start(self, loops: Loops, number: Callable[[], int]) -> None:
        """Start the loops of all shards; `number` returns the term."""
        for shard in self.all:
            at = f" {shard.number}" if shard.number else ""
            loops.start(f"scheduler{at}", partial(shard.scheduler.run, number))
            loops.start(f"allocator{at}", shard.allocator.run)
            loops.start(f"pool keeper{at}", shard.keeper.run, AfterFailure.RESTARTS)

    def _command_for(self, machine: str, task: str) -> TaskSpec | Stop | None:
        """Return the command about a task for a machine.

        The shard of the machine decides about tasks of unknown jobs.
        """
        record: JobRecord | None = self._parts.jobs.find(task.rpartition("-")[0])
        if record is not None:
            number = self.number_of_entitlement(record.spec.entitlement)
        else:
            known = self._parts.region.broker.table.find(machine)
            number = self._ownership.shard_of(known.entitlement if known is not None else "")
        shard = self._by_number.get(number)
        return None if shard is None else shard.scheduler.wanted(machine, task)


def _make_shard(number: int, parts: ShardParts, allocator: Allocator) -> RunningShard:
    placements = Placements(allocator, allocator.region.owns)
    scheduler = Scheduler(
        allocator.region,
        parts.jobs,
        placements,
        dispatcher=parts.dispatcher,
        event_log=parts.event_log,
        controllers=parts.controllers,
        losses=parts.losses,
    )
    return RunningShard(
        number=number,
        allocator=allocator,
        keeper=PoolKeeper(allocator.region, allocator),
        scheduler=scheduler,
        planner=JobPlanner(parts.jobs, placements, parts.control, scheduler),
    )


def allocators_of(
    region: Region,
    portal: Portal,
    jobs: JobTable,
    store: Store,
    ownership: OwnershipMap,
    runs: Callable[[int], bool] = lambda _make_shard: True,
) -> dict[int, Allocator]:
    """Return an allocator for each shard that this process runs.

    If one process has all shards, shard 0 finishes the transactions of shards that no longer
    exist. If shards are processes, each shard finishes its own transactions.
    """
    made = {}
    are_processes = not all(map(runs, range(SHARDS_MAX)))
    count = SHARDS_MAX if are_processes else region.settings.shards
    names = [f"{ALLOCATOR}-{n}" if n else ALLOCATOR for n in range(count)]
    for number, name in enumerate(names):
        if runs(number):
            owns = _owner(ownership, number)
            made[number] = Allocator(replace(region, owns=owns), portal, jobs, store, name)
    running = tuple(f"{name}:" for name in names[1:])
    if 0 in made:
        made[0].allocations.is_ours = lambda transaction: not transaction.startswith(running)
    return made


def _owner(ownership: OwnershipMap, number: int) -> Callable[[str], bool]:
    return lambda pool: ownership.shard_of(pool) == number and not ownership.is_moving(pool)
