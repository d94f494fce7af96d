"""Finds the shard of an entitlement, job or path, and reports what each shard owns.

A shard is a scheduler with its allocator (docs/adr/0152). Each entitlement has one shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.pool_keeper import PoolKeeper
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import ShardLoad, ShardLoads
from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.pools import members, pool_of
from control_plane.portal.portal import Portal
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.job_planner import JobPlanner
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.scheduler import Scheduler
from control_plane.shards.core.transfers import in_transfer
from control_plane.shards.ownership import SHARDS_MAX, OwnershipMap
from control_plane.shards.scoping import ShardScopes
from control_plane.task_control.controllers import Controllers
from wire.errors import Busy, Conflict, NotFound


@dataclass(frozen=True, slots=True)
class RunningShard:
    """One scheduler with its allocator."""

    number: int
    allocator: Allocator
    keeper: PoolKeeper
    scheduler: Scheduler
    planner: JobPlanner


@dataclass(frozen=True, slots=True)
class ShardParts:
    """The components that all shards of the process share."""

    region: Region
    portal: Portal
    jobs: JobTable
    control: JobControl
    dispatcher: Dispatcher
    event_log: EventLog
    controllers: Controllers
    losses: Losses
    counters: Counters


class ShardLookup:
    """The shards of this process by number, and the map of owners."""

    def __init__(
        self, parts: ShardParts, ownership: OwnershipMap, shards: Mapping[int, RunningShard]
    ) -> None:
        self._parts, self._ownership, self._by_number = parts, ownership, shards
        self.all = [*shards.values()]
        """The shards of this process."""
        regions, held = parts.region.settings.shard_regions, parts.region.broker.held
        self.scopes = ShardScopes(regions, ownership, parts.portal.table, held)

    @property
    def count(self) -> int:
        """Return the number of shards of the region, those of other processes included."""
        return self._parts.region.settings.shards

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
        """Return whether a free machine has tasks of these shards that must be removed.

        A lost machine may be free when it returns, and still run tasks that were moved elsewhere.
        Only the process of their shard has the records of these moves, so it removes the tasks.
        """
        if record.entitlement != FREE:
            return False
        placed = self.all[0].allocator.directory.tasks(record.machine).values()
        return any(on.leaving and self.number_of_job(on.job) in self._by_number for on in placed)

    def find_pool(self, pool: str) -> RunningShard | None:
        """Return the shard that owns a pool; None: another process runs it."""
        return self._by_number.get(self._ownership.shard_of(pool))

    def of_pool(self, pool: str) -> RunningShard:
        """Return the shard that owns a pool; shard 0 for the free pool."""
        return self._require_shard(self._ownership.shard_of(pool))

    def of_entitlement(self, name: str) -> RunningShard:
        """Return the shard that places the tasks of an entitlement."""
        return self._require_shard(self.number_of_entitlement(name))

    def of_job(self, name: str) -> RunningShard:
        """Return the shard of a job; an arbitrary one if there is no such job."""
        number = self.number_of_job(name)
        return self.all[0] if number is None else self._require_shard(number)

    def of_number(self, text: str) -> RunningShard:
        """Return the shard with the number in a URL path, or raise `NotFound`."""
        number = self.parse_number(text)
        if number is None:
            raise NotFound(f"there is no shard {text[:20]!r}: they are 0 to {self.count - 1}")
        return self._require_shard(number)

    def parse_number(self, text: str) -> int | None:
        """Return the number in a URL path; None: there is no shard with this number."""
        if not text.isdecimal() or len(text) > len(str(SHARDS_MAX)) or int(text) >= self.count:
            return None
        return int(text)

    def _require_shard(self, number: int) -> RunningShard:
        found = self._by_number.get(number)
        if found is None:
            raise Busy(
                f"shard {number} does not run in this process",
                hint="the entitlement may have moved just now: try again",
            )
        return found

    # -- loads

    def loads(self) -> list[ShardLoad]:
        """Return the load of each shard, by number."""
        broker, counters, loads = self._parts.region.broker, self._parts.counters, []
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
                        if self._has_shard(pool, held[pool], pools[pool])
                    ),
                    entitlements=own,
                    jobs=sum(counters.jobs_of[name] for name in names),
                    tasks=sum(counters.tasks_of[name] for name in names),
                    moving=sorted(coming[number]),
                    region=self.scopes.region_of(number),
                    pinned={pool: at for pool in own if (at := specs[pool].region)},
                )
            )
        return loads

    def _has_shard(self, pool: str, machines: int, names: Iterable[str]) -> bool:
        """Return whether an entitlement has a shard; an unused one may be assigned to any.

        `names` are the entitlements of the pool.
        """
        jobs_of = self.all[0].allocator.jobs_of
        return bool(machines or self._ownership.table.find(pool) or any(map(jobs_of, names)))

    def jobs_in(self, pool: str) -> list[str]:
        """Return the jobs whose tasks are on machines of a pool, or will be."""
        jobs_of = self.all[0].allocator.jobs_of
        return sorted({job for name in self._members(pool) for job in jobs_of(name)})

    # -- jobs that keep entitlements in one shard

    def check_move(self, job: str, entitlement: str) -> None:
        """Raise `Conflict` if a job would move to another shard: a job belongs to one shard."""
        source, target = self.number_of_job(job), self.number_of_entitlement(entitlement)
        if source is not None and source != target:
            raise Conflict(
                f"cannot move job {job!r}: it is in shard {source}, and entitlement "
                f"{entitlement!r} is in shard {target}; a job belongs to one shard",
                hint=f"twinectl shard move {entitlement} --to {source}",
            )

    def in_one_shard(self, job: str, entitlement: str) -> Mapping[str, int]:
        """Return comparisons that hold while a job and another entitlement stay in one shard.

        Raises `Conflict` if they are in two shards. Raises `Busy` if one of the entitlements is
        moving, because no shard owns it meanwhile.
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

    def _members(self, pool: str) -> set[str]:
        """Return the entitlements whose tasks run on the machines of a pool."""
        return set(members(self._parts.portal.specs()).get(pool, [pool]))

    def _check_no_transfer(self, pool: str, jobs: list[str]) -> None:
        """Raise `Conflict` if a job is in transfer between this entitlement and another."""
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
