"""Regions of a few machines in memory for tests of allocations. Pass only what a test is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from agent.api import Location
from control_plane.allocator.core.claims import Change
from control_plane.allocator.core.class_maxima import FREE_OF
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Bucket, Machine
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Plan, Request
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity, Place

GIB = 1 << 30
TASK = Demand(memory_bytes=GIB, cpus=1.0)
POOL = "e1"


def a_capacity(machine_type: str = "small", **fields: Any) -> Capacity:
    """Return the capacity of a machine with room for four of `TASK`."""
    return Capacity(
        **{"machine_type": machine_type, "rru": 4.0, "cpus": 4.0, "memory_bytes": 4 * GIB, **fields}
    )


def a_place(
    msb: str = "msb1",
    dc: str = "dc1",
    rack: str = "rack1",
    row: str = "row1",
    region: str = "local",
) -> Place:
    """Return a place in a region."""
    return Place.of(Location(region=region, datacenter=dc, msb=msb, row=row, rack=rack))


def add(
    index: RegionIndex,
    names: str | Iterable[str],
    msb: str = "msb1",
    dc: str = "dc1",
    pool: str = POOL,
    *,
    rack: str = "rack1",
    row: str = "row1",
    blocked: str = "",
    capacity: Capacity | None = None,
    **fields: Any,
) -> list[Machine]:
    """Add machines with equal properties to a region. Blanks separate several names."""
    names = names.split() if isinstance(names, str) else list(names)
    for name in names:
        place = a_place(msb, dc, rack, row)
        index.put(name, capacity or a_capacity(**fields), place, pool, blocked)
    return [index.machines[name] for name in names]


def a_region(
    datacenters: int = 1,
    msbs: int = 3,
    machines: int = 2,
    pool: str = POOL,
    **fields: Any,
) -> RegionIndex:
    """Return a region with `msbs` per data center and `machines` (`dc1-msb2-0`) per MSB."""
    index = RegionIndex()
    for dc in range(1, datacenters + 1):
        for msb in range(1, msbs + 1):
            names = [f"dc{dc}-msb{msb}-{i}" for i in range(machines)]
            add(index, names, f"msb{msb}", f"dc{dc}", pool, **fields)
    return index


def a_request(
    tasks: int | Sequence[int] = 3,
    job: str = "web",
    pool: str = POOL,
    demand: Demand = TASK,
    *,
    leave: str = "",
    avoid: str = "",
    running: bool = True,
    **fields: Any,
) -> Request:
    """Return a request for one group of equal tasks."""
    indices = tuple(range(tasks)) if isinstance(tasks, int) else tuple(tasks)
    group = Group(demand, indices, frozenset({leave} - {""}), avoid, running)
    return Request(job, pool, (group,) if indices else (), **fields)


def settle(index: RegionIndex, made: Plan) -> list[Machine]:
    """Carry out a plan. Return the machines that it leaves without tasks."""
    assert index.reserve(made.change) == ()
    return index.settle(made.change)


def allocate(index: RegionIndex, request: Request, allowance: Allowance | None = None) -> Plan:
    """Plan a request and carry it out. Without an allowance, no machine is taken."""
    made = plan(index, request, allowance or Allowance(machines=0))
    settle(index, made)
    return made


def where(index: RegionIndex, job: str = "web") -> dict[int, str]:
    """Return the machine of each task of a job."""
    claims = index.claims.get(job)
    return {claim.task: claim.machine.name for claim in claims} if claims is not None else {}


def per(index: RegionIndex, level: str, job: str = "web") -> list[int]:
    """Return how many tasks of a job each place of a level with machines has, sorted."""
    count = Counter({_bin(machine, level): 0 for machine in index.machines.values()})
    claims = index.claims.get(job)
    count.update(_bin(claim.machine, level) for claim in claims or ())
    return sorted(count.values())


def _bin(machine: Machine, level: str) -> str:
    return machine.name if level == "machine" else str(getattr(machine.place, level))


def gains(index: RegionIndex) -> int:
    """Return a number that rises whenever a request in any pool may find more room."""
    return sum(index.gains(pool) for pool in index.pools)


def state(index: RegionIndex) -> object:
    """Return everything that allocations may change, in a comparable form."""
    machines = {
        m.name: (
            m.pool,
            m.blocked,
            (m.free_cpu, m.free_memory, m.free_gpus, m.free_network, m.free_disk),
            sorted(claims.job for claims in m.jobs),
            frozenset(m.ports.taken) if m.ports else frozenset(),
        )
        for m in index.machines.values()
    }
    claims = {
        job: [(c.task, c.machine.name, c.demand, c.ports) for c in claims]
        for job, claims in index.claims.items()
    }
    pools = {
        name: (pool.size, pool.micro_rru, {t: n for t, n in pool.per_type.items() if n})
        for name, pool in index.pools.items()
        if pool.size
    }
    return machines, claims, pools


def check(index: RegionIndex, unsettled: Iterable[Change] = ()) -> None:
    """Fail unless the index is consistent and no machine exceeds its capacity.

    Claims of changes that are reserved and not settled count as well.
    """
    unsettled = list(unsettled)
    charged: dict[str, list[Any]] = {name: [] for name in index.machines}
    for job, claims in index.claims.items():
        assert claims.job == job
        for claim in claims:
            assert index.machines.get(claim.machine.name) is claim.machine
            assert claim.machine.pool == claims.pool or not claims.valid
            charged[claim.machine.name].append((claims, claim))
    for change in unsettled:
        for claim in change.claims:
            if index.machines.get(claim.machine.name) is claim.machine:
                charged[claim.machine.name].append((index.claims[change.job], claim))
    for machine in index.machines.values():
        _check_machine(machine, charged[machine.name], spent_twice=bool(unsettled))
    for pool in index.pools.values():
        found = list(pool.machines())
        assert pool.size == len(found) == sum(b.size for b in pool.buckets.values())
        assert all(machine.pool == pool.name for machine in found)
        for bucket in pool.buckets.values():
            _check_maxima(bucket)
    shelved = [machine.name for pool in index.pools.values() for machine in pool.machines()]
    assert sorted(shelved) == sorted(index.machines)


def _check_maxima(bucket: Bucket) -> None:
    """Make the bucket keep maxima of all its space classes, as if a search had failed in each."""
    for space_class, row in enumerate(bucket.by_class):
        if not row:
            continue
        for kind, free in FREE_OF.items():
            found = bucket.roomiest(kind, space_class)
            assert found in row
            assert free(found) == max(map(free, row))


def _check_machine(machine: Machine, charged: list[Any], *, spent_twice: bool) -> None:
    capacity = machine.capacity
    demands = [claim.demand for _, claim in charged]
    ports = [port for _, claim in charged for port in (claim.ports or {}).values()]
    assert len(set(ports)) == len(ports)
    assert (machine.ports.taken if machine.ports else set()) == set(ports)
    assert Counter(map(id, machine.jobs)) == Counter(id(claims) for claims, _ in charged)
    assert machine.free_memory >= 0
    assert machine.free_cpu >= 0
    assert machine.free_gpus >= 0
    assert machine.free_network >= 0
    assert machine.free_disk >= 0
    if spent_twice:  # capacity that changes free belongs to them until they are settled
        return
    assert machine.free_cpu == capacity.cpu_room - sum(d.cpu_on(capacity) for d in demands)
    assert machine.free_memory == capacity.memory_bytes - sum(d.memory_bytes for d in demands)
    assert machine.free_gpus == capacity.gpus - sum(d.gpus for d in demands)
    assert machine.free_network == capacity.network_mbps - sum(d.network_mbps for d in demands)
    assert machine.free_disk == capacity.disk_bytes - sum(d.disk_bytes for d in demands)


__all__ = ["FREE", "Allowance", "Group", "Machine", "RegionIndex", "Request", "plan"]
