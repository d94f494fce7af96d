"""Reads from the allocators which machines pools use and wait for, as input for `core.matching`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

from control_plane.agents.region import Region
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import admits, is_large_enough
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.request import Request
from control_plane.api.capacity import EntitlementRecord
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity
from control_plane.broker.loans import Loans
from control_plane.runtime.table import Checkpoint, Table

OwnerOf = Callable[[str], Allocator]
"""Returns the allocator that decides about a pool."""
CHECKPOINT_EVERY = 200
"""Machines or tasks that are read between two checks whether other tasks of the loop wait."""


@dataclass(frozen=True, slots=True)
class LenderParts:
    """The other roles that the lender uses."""

    region: Region
    entitlements: Table[EntitlementRecord]
    allocators: Sequence[Allocator]
    owner_of: OwnerOf
    loans: Loans
    unwell: Callable[[], str] = lambda: ""
    """Returns why nothing may be lent now; empty if the region is well."""

    def tasks_on(self, machine: str) -> int:
        """Return how many tasks a machine has, including those that are about to leave it."""
        return len(self.allocators[0].directory.tasks(machine))

    def free(self) -> int:
        """Return how many free machines could be taken or lent."""
        return sum(1 for _ in unused(self.owner_of, FREE))


@dataclass(slots=True)
class PoolWaiting:
    """The machines that the tasks of one pool wait for."""

    machines: int = 0
    types: set[str] = field(default_factory=set)
    """Machine types on which some of them can run."""


def per_machine(demand: Demand, capacity: Capacity) -> int:
    """Return how many such tasks fit on an empty machine; 0 if it is too small for one."""
    if not is_large_enough(demand, capacity):
        return 0
    cpu = demand.cpu_on(capacity)
    bounds = [
        capacity.memory_bytes // demand.memory_bytes if demand.memory_bytes else None,
        capacity.cpu_room // cpu if cpu else None,
        int(capacity.gpus / demand.gpus) if demand.gpus else None,
        capacity.network_mbps // demand.network_mbps if demand.network_mbps else None,
        capacity.disk_bytes // demand.disk_bytes if demand.disk_bytes else None,
    ]
    return min((bound for bound in bounds if bound is not None), default=1)


def machine_share(demand: Demand, capacity: Capacity) -> float:
    """Return the largest share of a machine's memory, CPU and GPUs that a task claims."""
    return max(
        demand.memory_bytes / capacity.memory_bytes if capacity.memory_bytes else 0.0,
        demand.cpu_on(capacity) / capacity.cpu_room if capacity.cpu_room else 0.0,
        demand.gpus / capacity.gpus if capacity.gpus else 0.0,
    )


def waiting(allocators: Iterable[Allocator]) -> dict[str, PoolWaiting]:
    """Return pool → the machines that its tasks without a machine would fill."""
    pools: dict[str, PoolWaiting] = {}
    for allocator in allocators:
        kinds, claims = allocator.index.kinds(), allocator.index.claims
        for request in allocator.waiting.requests():
            allowed = [k for k in kinds if allocator.quotas.allows(request.pool, k)]
            for demand, tasks in _unplaced(request, claims.get(request.job)):
                per_type = {k.capacity.machine_type: _tasks_on(demand, k) for k in allowed}
                types = {kind for kind, count in per_type.items() if count}
                if types:
                    pool = pools.setdefault(request.pool, PoolWaiting())
                    pool.machines += ceil(tasks / max(per_type.values()))
                    pool.types |= types
    return pools


def _tasks_on(demand: Demand, kind: Machine) -> int:
    """Return how many such tasks an empty machine of a kind takes."""
    suits = not demand.requires or admits(demand, kind)
    return per_machine(demand, kind.capacity) if suits else 0


def _unplaced(request: Request, claims: Claims | None) -> Iterator[tuple[Demand, int]]:
    """Yield each demand with the number of its tasks that need a machine.

    These tasks have none, or must leave the one they have.
    """
    for group in request.groups:
        missing = 0
        for task in group.tasks:
            claim = claims.get(task) if claims is not None else None
            missing += claim is None or claim.machine.name in group.leave
        if missing:
            yield group.demand, missing


async def used_by_msb(
    owner_of: OwnerOf, pool: str, lent: Callable[[str], bool], checkpoint: Checkpoint
) -> Counter[str]:
    """Return MSB → the number of a pool's own machines with tasks."""
    used = Counter[str]()
    for number, machine in enumerate(list(owner_of(pool).index.pool(pool).machines())):
        if number % CHECKPOINT_EVERY == 0:
            await checkpoint()
        if machine.jobs and not lent(machine.name):
            used[machine.place.msb] += 1  # a path that begins with the data center
    return used


def unused(owner_of: OwnerOf, pool: str) -> Iterator[Machine]:
    """Yield the usable machines of a pool on which nothing is placed."""
    for machine in owner_of(pool).index.pool(pool).machines():
        if not machine.jobs and not machine.blocked:
            yield machine


def usable_free(owner_of: OwnerOf, types: Collection[str]) -> int:
    """Return how many free machines of these types could be taken."""
    return sum(m.capacity.machine_type in types for m in unused(owner_of, FREE))
