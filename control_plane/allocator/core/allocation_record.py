"""Converts the allocation of a job to its stored record, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from control_plane.allocator.core.claims import Change, Claim, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import NO_NEIGHBOURS, NeighbourJobs
from control_plane.api.allocations import AllocationRecord, StoredDemand
from control_plane.api.policy import Property
from control_plane.api.requirement_parser import parse
from control_plane.api.requirements import In, is_pair, text_of


def restoring(record: AllocationRecord, index: RegionIndex, step: int) -> Iterator[int]:
    """Restore the claims of a record on machines that the region still has, in steps.

    Yields the number of tasks read in each step, at most `step`.
    """
    machines = index.machines
    if len(record.demands) == 1 and not record.ports:  # nearly all jobs
        demand = _demand(record.demands[0])
        for first in range(0, len(record.machines), step):
            names = record.machines[first : first + step]
            some = list(map(machines.get, names))  # the name "" means no machine
            index.restore_equal(record.job, record.pool, first, some, demand)
            yield len(names)
        return
    claims = claims_of(record, machines)
    for first in range(0, len(claims), step):
        index.restore(record.job, record.pool, claims[first : first + step])
        yield len(claims[first : first + step])


def claims_of(record: AllocationRecord, machines: Mapping[str, Machine]) -> list[Claim]:
    """Return the claims of a record on machines that the region still has."""
    demands = [_demand(stored) for stored in record.demands]
    claims = []
    for task, name in enumerate(record.machines):
        machine = machines.get(name) if name else None
        if machine is None:
            continue
        demand = demands[record.demand_of[task] if record.demand_of else 0]
        claims.append(Claim(task, machine, demand, record.ports.get(task)))
    return claims


def record_after(
    change: Change, claims: Claims | None, neighbours: NeighbourJobs = NO_NEIGHBOURS
) -> AllocationRecord | None:
    """Return the record of a job after a change that is reserved but not settled."""
    after = (claims or Claims(change.job, change.pool)).after(change)
    if not after.machines:
        return None
    demands, which = after.demands()
    return AllocationRecord(
        schema=1,
        job=change.job,
        pool=change.pool,
        machines=[machine.name if machine is not None else "" for machine in after.machines],
        demands=[_stored(demand) for demand in demands],
        demand_of=which,
        ports=after.ports,
        apart_from=neighbours.apart_from,
        together_with=neighbours.together_with,
    )


@lru_cache(maxsize=1024)
def _stored(demand: Demand) -> StoredDemand:
    return StoredDemand(
        memory_bytes=demand.memory_bytes,
        cpus=demand.cpus,
        rru=demand.rru,
        gpus=demand.gpus,
        network_mbps=demand.network_mbps,
        disk_bytes=demand.disk_bytes,
        ports=demand.ports,
        requires=tuple(
            (Property(t[0]), tuple(sorted(t[1])))
            for t in demand.requires
            if isinstance(t, tuple) and is_pair(t)
        ),
        where=tuple(text_of(t) for t in demand.requires if not is_pair(t)),
    )


def _demand(stored: StoredDemand) -> Demand:
    return Demand(
        memory_bytes=stored.memory_bytes,
        cpus=stored.cpus,
        rru=stored.rru,
        gpus=stored.gpus,
        network_mbps=stored.network_mbps,
        disk_bytes=stored.disk_bytes,
        ports=stored.ports,
        requires=(
            *(In(p, frozenset(values)) for p, values in stored.requires),
            *map(parse, stored.where),
        ),
    )
