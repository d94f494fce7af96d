"""Every machine of a region, in its pool; counters rise whenever there may be more room.

`RegionIndex` adds the claims of jobs on these machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from control_plane.allocator.core.claims import recounted_cpu
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import admits_any_of, judge
from control_plane.allocator.core.machine_class import KindCounts
from control_plane.allocator.core.machine_pools import Bucket, Machine, Pool
from control_plane.allocator.core.no_fit_cache import Relief
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.stranding import Totals
from control_plane.api.capacity_report import PowerBudget
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity, Place
from control_plane.runtime.big_map import BigMap

IndexedMachine = tuple[str, Capacity, Place, str, str]
"""Name, capacity, place, pool, and why it takes no tasks (empty if it takes tasks)."""
_REASONS_KEPT = 1_000


class RegionMachines:
    """Every machine of the region."""

    def __init__(self, power: Power | None = None) -> None:
        """Without `power` no place has a power budget."""
        self.power = power
        self.machines: BigMap[Machine] = BigMap()
        self._relief = Relief()
        self.pools: dict[str, Pool] = {FREE: Pool(FREE, relief=self._relief)}
        self._least_gain = 0
        """The gain with which a pool begins: at least the gain it had when it was dropped."""
        self.losses = 0
        """Rises whenever a machine stops taking tasks, so that its bin may no longer count."""
        self._kinds = KindCounts()
        self._taking: dict[str, str] = {}
        """Machine → pool that is taking it, while its broker's record still has it as free."""
        self._reported: dict[str, str] = {}
        """Machine that is being taken → the pool that its broker reported meanwhile."""
        self._moved: dict[Bucket, int] = {}
        """Bucket → by how many machines it has grown since the last `take_bucket_growth`."""
        self.reasons: dict[object, tuple[int, Sequence[str]]] = {}
        """Kind of request → the gains of its pool, and why it found no room at these gains."""

    def remember_reasons(self, kind: object, gains: int, reasons: Sequence[str]) -> None:
        """Cache why requests of a kind found no room; the oldest entries are dropped."""
        self.reasons.pop(kind, None)
        self.reasons[kind] = gains, reasons
        if len(self.reasons) > _REASONS_KEPT:
            del self.reasons[next(iter(self.reasons))]

    def pool(self, name: str) -> Pool:
        """Return a pool; for one without machines, a new object that is not kept."""
        return self.pools.get(name) or Pool(name, self._least_gain, self._relief)

    def gains(self, pool: str) -> int:
        """Return a number that rises whenever a request in this pool may find more room."""
        found = self.pools.get(pool)
        return (found.gain if found is not None else self._least_gain) + self.pools[FREE].gain

    def take_bucket_growth(self) -> dict[Bucket, int]:
        """Return by how many machines each bucket has grown since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    # -- machines

    def put(self, name: str, capacity: Capacity, place: Place, pool: str, blocked: str) -> None:
        """Add or update a machine; results that rely on its old state become invalid."""
        machine = self.machines.get(name)
        if name in self._taking:
            self._reported[name] = pool
            pool = self._taking[name]
        if machine is None:
            machine = self.machines[name] = Machine(name, capacity, place, blocked)
            self._enter(machine, pool)
            self._kinds.count(capacity, place, 1)
            return
        same = (machine.capacity, machine.place, machine.pool) == (capacity, place, pool)
        if same and machine.blocked == blocked:
            return
        before = self._leave(machine)
        if not same:
            self._kinds.count(machine.capacity, machine.place, -1)
            self._kinds.count(capacity, place, 1)
        old, machine.capacity = machine.capacity, capacity
        if (capacity.rru, capacity.cpus) != (old.rru, old.cpus):
            machine.free_cpu = recounted_cpu(machine)
        machine.free_memory += capacity.memory_bytes - old.memory_bytes
        machine.free_gpus += capacity.gpus - old.gpus
        machine.free_network += capacity.network_mbps - old.network_mbps
        machine.free_disk += capacity.disk_bytes - old.disk_bytes
        self.losses += bool(blocked and not machine.blocked)
        machine.place, machine.blocked = place, blocked
        if self.power is not None and machine.jobs and self.power.reserve_power(machine):
            self._note_relief()
        self._enter(machine, pool)
        self._drop_if_empty(before)
        if not same:
            self._invalidate(machine)
        elif blocked:
            for claims in machine.jobs:
                claims.valid = claims.valid and not claims.needs_usable

    def put_many(self, machines: Iterable[IndexedMachine]) -> None:
        """Do `put` for each machine; machines that are new to the index take half the time."""
        machines = list(machines)  # the iterator may fail, or read this index
        new: dict[str, Machine] = {}
        known: list[IndexedMachine] = []
        alike: dict[tuple[object, ...], list[Machine]] = {}
        for each in machines:
            name, capacity, place, pool, blocked = each
            if name in self.machines or name in new or name in self._taking:
                known.append(each)
                continue
            machine = new[name] = Machine(name, capacity, place, blocked)
            key = (pool, id(capacity), place.region, place.msb, not blocked)
            others = alike.get(key)
            if others is None:
                alike[key] = [machine]
            else:
                others.append(machine)
        kinds: dict[tuple[object, ...], tuple[Machine, int]] = {}
        for (pool_name, *kind, _), group in alike.items():
            self._enter_all(group, str(pool_name))
            sample, number = kinds.get(tuple(kind), (group[0], 0))
            kinds[tuple(kind)] = sample, number + len(group)
        for sample, number in kinds.values():
            self._kinds.count(sample.capacity, sample.place, number)
        self.machines.update(new)
        for each in known:
            self.put(*each)

    def block(self, name: str, blocked: str) -> None:
        """Set why a machine takes no tasks now; empty if it takes tasks."""
        if (machine := self.machines.get(name)) is not None:
            self.put(name, machine.capacity, machine.place, machine.pool, blocked)

    def _enter(self, machine: Machine, pool_name: str) -> None:
        self._enter_all([machine], pool_name)

    def _enter_all(self, machines: list[Machine], pool_name: str) -> None:
        """Put equal machines into a pool; all belong to the same space class."""
        sample = machines[0]
        pool = self.pools.setdefault(pool_name, self.pool(pool_name))
        bucket = pool.bucket(sample)
        pool.count(sample, len(machines))
        bucket.size += len(machines)
        self._moved[bucket] = self._moved.get(bucket, 0) + len(machines)
        bucket.put_all(machines)
        if not sample.blocked:
            self._count_gain(bucket)

    def _move(self, machine: Machine, pool: str) -> None:
        """Move a machine to another pool."""
        before = self._leave(machine)
        self._enter(machine, pool)
        self._drop_if_empty(before)

    def _leave(self, machine: Machine) -> Bucket:
        """Take a machine out of its bucket; return the bucket, which may be empty now."""
        bucket = machine.bucket
        bucket.moves += 1
        bucket.drop(machine)
        bucket.moves += 1
        bucket.size -= 1
        self._moved[bucket] = self._moved.get(bucket, 0) - 1
        bucket.pool.count(machine, -1)
        return bucket

    def _drop_if_empty(self, bucket: Bucket) -> None:
        """Remove a bucket that has no machines, and its pool if that has none."""
        pool = bucket.pool
        if not bucket.size:
            pool.drop(bucket)
        if not pool.size and pool.name != FREE:
            del self.pools[pool.name]
            self._least_gain = max(self._least_gain, pool.gain)

    def _count_gain(self, bucket: Bucket) -> None:
        bucket.gain += 1
        bucket.pool.gain += 1

    @staticmethod
    def _invalidate(machine: Machine) -> None:
        for claims in machine.jobs:
            claims.valid = False

    def kinds(self) -> list[Machine]:
        """Return an empty, usable machine of each kind and MSB that the region has.

        It has the properties in `SHARED` of the others, but no labels and capabilities.
        """
        return [Machine("", capacity, place, "") for capacity, place in self._kinds]

    def totals(self) -> Totals:
        """Return the sums over all machines."""
        return self._kinds.totals()

    def why_short(self, machine: Machine) -> str:
        """Describe the lack of power that keeps a machine from its first task; empty if none."""
        return self.power.describe_lack(machine) if self.power is not None else ""

    def power_budgets(self) -> list[PowerBudget]:
        """Return the places that have a power budget, and their use."""
        return self.power.shown() if self.power is not None else []

    def fitting(self, demand: Demand, pools: Iterable[str] | None = None) -> Iterator[Machine]:
        """Yield the machines of some pools, or of all, that could take such a task now (AL6).

        Buckets that a requirement excludes or that have no room are skipped.
        """
        for name in list(self.pools) if pools is None else pools:
            pool = self.pools.get(name)
            for bucket in list(pool.buckets.values()) if pool is not None else ():
                if bucket.is_closed(demand) or not admits_any_of(demand, bucket):
                    continue
                for machine in bucket.usable(demand):
                    if not judge(demand, machine, machine) and not self._is_short(machine):
                        yield machine

    def note_gain(self, pool: str = FREE) -> None:
        """Record that more may fit in a pool than before, for a reason other than room."""
        found = self.pools.get(pool)
        if found is not None:
            found.gain += 1
        else:
            self._least_gain += 1

    def _is_short(self, machine: Machine) -> bool:
        return self.power is not None and self.power.short(machine) is not None

    def _release_power(self, machine: Machine) -> None:
        if self.power is not None and self.power.release_power(machine):
            self._note_relief()

    def _note_relief(self) -> None:
        self._relief.count += 1
        self.note_gain()
