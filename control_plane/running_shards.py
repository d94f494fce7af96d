"""The shards of this process: a scheduler and an allocator each, 1:1, by entitlement.

All of them have the same brokers, jobs, portal and dispatcher. A shard decides about the pools
that the map gives it, and about no others (docs/adr/0152).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from agent.api import TaskSpec
from control_plane.agents.core.commands import Stop
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.region import Region
from control_plane.allocator import handover
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.pool_keeper import PoolKeeper
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import ShardLoad, ShardLoads, ShardMoved
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.pools import members, pool_of
from control_plane.portal.portal import Portal
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.loops import Failing, Loops
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.job_planner import JobPlanner
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shards.core.scopes import least_loaded_first
from control_plane.shards.core.transfers import in_transfer
from control_plane.shards.ownership import SHARDS_MAX, OwnershipMap
from control_plane.shards.scoping import ShardScopes
from control_plane.store import Store
from control_plane.task_control.controllers import Controllers
from wire.errors import Busy, Conflict, NotFound, TwineError

log = logging.getLogger(__name__)
IDLE_S, _PAUSE_S = 10.0, 0.01
"""How long a move waits for what is under way in its entitlement, and between two checks."""
_SETTLE_S = 1.0
"""Between two reads of whether the new owner was written, while the store does not answer."""
ALLOCATOR = "allocator"
"""Name of shard 0's allocator, and of the only allocator of earlier releases."""


@dataclass(frozen=True, slots=True)
class RunningShard:
    """One scheduler with its allocator."""

    number: int
    allocator: Allocator
    placements: Placements
    keeper: PoolKeeper
    scheduler: Scheduler
    planner: JobPlanner


@dataclass(frozen=True, slots=True)
class ShardParts:
    """What all shards of the process use."""

    region: Region
    portal: Portal
    jobs: JobTable
    control: JobControl
    dispatcher: Dispatcher
    event_log: EventLog
    controllers: Controllers
    losses: Losses
    census: Counters


class RunningShards:
    """The shards by number; each call goes to the shard that owns its object."""

    def __init__(
        self, parts: ShardParts, ownership: OwnershipMap, allocators: Mapping[int, Allocator]
    ):
        """Run nothing yet; `allocators` are those of `allocators_of`."""
        self._parts, self._ownership = parts, ownership
        regions, held = parts.region.settings.shard_regions, parts.region.broker.held
        self.scopes = ShardScopes(regions, ownership, parts.portal.table, held)
        self._moves = asyncio.Lock()
        self._by_number = {number: self._made(number, a) for number, a in allocators.items()}
        self.all = [*self._by_number.values()]
        """The shards of this process."""
        parts.dispatcher.follow(self._wanted)
        parts.control.in_one_shard = self.in_one_shard
        parts.portal.in_scope = self.scopes.may_become

    def _made(self, number: int, allocator: Allocator) -> RunningShard:
        parts = self._parts
        placing = Placements(allocator, allocator.region.owns)
        scheduler = Scheduler(
            allocator.region,
            parts.jobs,
            placing,
            parts.dispatcher,
            parts.event_log,
            parts.controllers,
            parts.losses,
        )
        keeper = PoolKeeper(allocator.region, allocator)
        planner = JobPlanner(parts.jobs, placing, parts.control, scheduler)
        return RunningShard(number, allocator, placing, keeper, scheduler, planner)

    @property
    def count(self) -> int:
        """Return the number of shards of the region, those of other processes included."""
        return self._parts.region.settings.shards

    def check_map(self) -> None:
        """Raise `ConfigError` if the map of owners contradicts the settings."""
        self._ownership.check(self.count, self._parts.portal.table)
        self.scopes.check_owners()

    async def is_ready(self, shard: int) -> bool:
        """Return whether a shard takes requests: those of this process do."""
        return shard in self._by_number

    def number_of_entitlement(self, name: str) -> int:
        """Return the number of the shard that places the tasks of an entitlement."""
        return self._ownership.shard_of(self._pool_of(name))

    def _pool_of(self, entitlement: str) -> str:
        record = self._parts.portal.table.find(entitlement)
        return pool_of(entitlement, record.spec) if record is not None else entitlement

    def number_of_job(self, name: str) -> int | None:
        """Return the number of the shard of a job; None: there is no such job."""
        record = self._parts.jobs.find(name)
        return None if record is None else self.number_of_entitlement(record.spec.entitlement)

    def has_left(self, record: MachineRecord) -> bool:
        """Return whether tasks of these shards have to be removed from a free machine.

        A lost machine may be free when it returns, with tasks that run elsewhere by
        now. Only the process of their shard knows that they left, so it removes them.
        """
        if record.entitlement != FREE:
            return False
        placed = self.all[0].allocator.directory.tasks(record.machine).values()
        return any(on.leaving and self.number_of_job(on.job) in self._by_number for on in placed)

    def find_pool(self, pool: str) -> RunningShard | None:
        """Return the shard that owns a pool; None: another process runs it."""
        return self._by_number.get(self._ownership.shard_of(pool))

    def of_pool(self, pool: str) -> RunningShard:
        """Return the shard that owns a pool; shard 0 for the free one."""
        return self._running(self._ownership.shard_of(pool))

    def of_entitlement(self, name: str) -> RunningShard:
        """Return the shard that places the tasks of an entitlement."""
        return self._running(self.number_of_entitlement(name))

    def of_job(self, name: str) -> RunningShard:
        """Return the shard of a job; an arbitrary one if there is no such job."""
        number = self.number_of_job(name)
        return self.all[0] if number is None else self._running(number)

    def of_number(self, text: str) -> RunningShard:
        """Return the shard with a number, as a path has it; `NotFound` if there is none."""
        number = self.number_in(text)
        if number is None:
            raise NotFound(f"there is no shard {text[:20]!r}: they are 0 to {self.count - 1}")
        return self._running(number)

    def number_in(self, text: str) -> int | None:
        """Return the number of an existing shard from a path; None: there is no such shard."""
        if not text.isdecimal() or len(text) > len(str(SHARDS_MAX)) or int(text) >= self.count:
            return None
        return int(text)

    def _running(self, number: int) -> RunningShard:
        found = self._by_number.get(number)
        if found is None:
            raise Busy(
                f"shard {number} does not run in this process",
                hint="the entitlement may have moved just now: try again",
            )
        return found

    # -- which shard has what

    def loads(self) -> list[ShardLoad]:
        """Return the load of each shard, by number."""
        broker, census, loads = self._parts.region.broker, self._parts.census, []
        specs, owner = self._parts.portal.specs(), self._ownership
        pools = members(specs)
        by_shard, coming = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
        for pool in pools:
            by_shard[owner.shard_of(pool)].append(pool)
            if (target := owner.moves_to(pool)) is not None:
                coming[target].append(pool)
        for number in range(self.count):
            own = by_shard[number]
            names = [name for pool in own for name in pools[pool]]
            held = {pool: broker.count(pool) for pool in own}
            loads.append(
                ShardLoad(
                    shard=number,
                    machines=sum(held.values()),
                    load=sum(
                        max(held[pool], specs[pool].machines or 0)
                        for pool in own
                        if self._is_given(pool, held[pool], pools[pool])
                    ),
                    entitlements=own,
                    jobs=sum(census.jobs_of[name] for name in names),
                    tasks=sum(census.tasks_of[name] for name in names),
                    moving=sorted(coming[number]),
                    region=self.scopes.of(number),
                    pinned={pool: at for pool in own if (at := specs[pool].region)},
                )
            )
        return loads

    def _is_given(self, pool: str, machines: int, names: Iterable[str]) -> bool:
        """Return whether an entitlement has a shard; an unused one may be given to any shard.

        `names` are the entitlements of the pool.
        """
        jobs_of = self.all[0].allocator.jobs_of
        return bool(machines or self._ownership.table.find(pool) or any(map(jobs_of, names)))

    def jobs_in(self, pool: str) -> list[str]:
        """Return the jobs whose tasks are, or will be, on machines of a pool."""
        names = members(self._parts.portal.specs()).get(pool, [pool])
        jobs_of = self.all[0].allocator.jobs_of
        return sorted({job for name in names for job in jobs_of(name)})

    async def give(self, entitlement: str) -> None:
        """Give an unused entitlement without a shard to the least loaded one that is ready."""
        record = self._parts.portal.table.find(entitlement)
        if self.count == 1 or record is None:
            return
        pool = pool_of(entitlement, record.spec)
        names = members(self._parts.portal.specs()).get(pool, [pool])
        if self._is_given(pool, self._parts.region.broker.count(pool), names):
            return
        for shard in least_loaded_first(self.loads(), self.scopes.pin_of(pool)):
            if await self.is_ready(shard):
                await self._ownership.give(pool, shard, self.scopes.may_get(pool, shard))
                return

    def check_move(self, job: str, entitlement: str) -> None:
        """Raise `Conflict` if a job would move to another shard: a job lives in one."""
        here, there = self.number_of_job(job), self.number_of_entitlement(entitlement)
        if here is not None and here != there:
            raise Conflict(
                f"cannot move job {job!r}: it is in shard {here}, and entitlement "
                f"{entitlement!r} is in shard {there}; a job belongs to one shard",
                hint=f"twinectl shard move {entitlement} --to {here}",
            )

    def in_one_shard(self, job: str, entitlement: str) -> Mapping[str, int]:
        """Return comparisons that hold while a job and another entitlement stay in one shard.

        Raises `Conflict` where they are in two shards, and `Busy` where one of them is moving:
        such a job has no owner.
        """
        self.check_move(job, entitlement)
        record = self._parts.jobs.get(job)
        pools = sorted(map(self._pool_of, {record.spec.entitlement, entitlement}))
        for pool in pools:
            if self._ownership.is_moving(pool):
                raise Busy(
                    f"cannot move job {job!r}: entitlement {pool!r} is moving to another shard",
                    hint="try again in some seconds",
                )
        return self._ownership.table.expect(pools)

    async def list_shards(self) -> ShardLoads:
        """Return the load of each shard, and the term."""
        return ShardLoads(shards=self.loads(), term=self._ownership.number())

    async def move(self, pool: str, to: int, *, dry_run: bool = False) -> ShardMoved:
        """Give an entitlement to another shard; no task restarts.

        Stops new operations, waits for those under way, reads the records, writes the new
        owner (the commit point), and continues there. `Busy` where something does not end: nothing
        changed then. A process that ends at any step starts with the owner in the map.
        """
        self._check_target(pool, to)
        source, jobs = self._ownership.shard_of(pool), self.jobs_in(pool)
        self._check_alone(pool, jobs)
        machines = len(self._parts.region.broker.held(pool))
        moves = source != to and not dry_run
        if moves:
            async with self._moves:
                work = self._tried(pool, to)  # it completes even if the client disconnects
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

    async def _tried(self, pool: str, to: int) -> TwineError | None:
        """Move, and return the error, if any: spawned work that raises would end the process."""
        try:
            await self._move(pool, to)
        except TwineError as e:
            return e
        return None

    async def _move(self, pool: str, to: int) -> None:
        source, target = self.of_pool(pool), self._running(to)
        self._ownership.moving[pool] = target.number  # from here on no shard begins work in it
        try:
            await self._until_written(pool)
            async with self._parts.jobs.lock(*self.jobs_in(pool)):
                jobs = self.jobs_in(pool)
                self._check_alone(pool, jobs)  # a transfer may have begun before the locks
                await self._until_idle(pool, source, jobs)
                stored = await handover.read(target.allocator, jobs)
                await self._write(pool, target.number)
                if self._ownership.shard_of(pool) == target.number:
                    handover.drop(source.allocator, jobs)
                    handover.adopt(target.allocator, pool, stored)
        finally:
            del self._ownership.moving[pool]
            for job in self.jobs_in(pool):
                source.scheduler.forget(job)
            self._wake(pool)

    def _wake(self, pool: str) -> None:
        """Wake the owner's work on the jobs and machines of a pool after a move."""
        owner = self.find_pool(pool)
        if owner is not None:
            for job in self.jobs_in(pool):
                owner.scheduler.wake(job)
            owner.keeper.look_at(pool)

    async def _until_written(self, pool: str) -> None:
        """Return once each job that was being written into a pool is known here (BUG-CP61).

        Such a job may be in transfer from another entitlement.
        """
        portal, names = self._parts.portal, self._members(pool)
        await self._wait_while(pool, "the write of a job", lambda: portal.is_applying(names))
        await self._parts.jobs.settle()

    async def _until_idle(self, pool: str, source: RunningShard, jobs: list[str]) -> None:
        allocator, asking = source.allocator, source.scheduler.asking

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

    async def _write(self, pool: str, shard: int) -> None:
        """Write the new owner, or raise; settles an unknown outcome first."""
        try:
            await self._ownership.move(pool, shard, self.scopes.may_get(pool, shard))
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
        self.scopes.may_get(pool, to)

    def _members(self, pool: str) -> set[str]:
        """Return the entitlements whose tasks run on the machines of a pool."""
        return set(members(self._parts.portal.specs()).get(pool, [pool]))

    def _check_alone(self, pool: str, jobs: list[str]) -> None:
        """Raise `Conflict` where a job is in transfer between this entitlement and another."""
        broker, records = self._parts.region.broker, self._parts.jobs
        directory = self.all[0].allocator.directory
        found = in_transfer(
            self._members(pool),
            [record for job in jobs if (record := records.find(job)) is not None],
            [task for held in broker.held(pool) for task in directory.leaving(held.machine)],
            broker.table.find,
            records.find,
        )
        if found is not None:
            job, others = found
            raise Conflict(
                f"cannot move entitlement {pool!r}: job {job!r} is moving between it and "
                f"{', '.join(sorted(others))}",
                hint="wait until that move ends, also on machines that do not answer",
            )

    # -- calls about one shard

    async def plan(self, spec: JobSpec, writer: str = "") -> JobPlan:
        """Return what applying a job would lead to; see `JobPlanner`."""
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
            loops.start(f"pool keeper{at}", shard.keeper.run, Failing.RESTARTS)

    def _wanted(self, machine: str, task: str) -> TaskSpec | Stop | None:
        """Return what a machine has to do with a task.

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


def allocators_of(
    region: Region,
    portal: Portal,
    jobs: JobTable,
    store: Store,
    ownership: OwnershipMap,
    runs: Callable[[int], bool] = lambda _shard: True,
) -> dict[int, Allocator]:
    """Return an allocator for each shard that this process runs; the map says what it owns.

    With all shards in one process, shard 0 finishes the transactions of shards that no longer
    exist. Where shards are processes, each finishes its own transactions.
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
