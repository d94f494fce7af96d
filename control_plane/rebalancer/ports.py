"""Protocols of the services that the ReBalancer calls; `roles.py` hands them in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.scheduler.ports import Places

Solve = Callable[[RegionModel, Effort], Awaitable[SolverAnswer]]
"""Solves a model without blocking this process; raises `Busy` if that fails."""


@dataclass(frozen=True, slots=True)
class ShardedPlaces:
    """The places of all shards of this process; each pool's come from the shard that owns it."""

    shards: Sequence[Places]
    shard_of: Callable[[str], int] = lambda _pool: 0
    granted: Callable[[str], EntitlementRecord | None] = lambda _pool: None
    """Returns the record of an entitlement."""

    @property
    def indexes(self) -> list[RegionIndex]:
        """Return the index of each shard."""
        return [shard.index for shard in self.shards]

    def of_pool(self, pool: str) -> Places:
        """Return the shard that owns a pool; the first one, without claims, for other processes.

        While shards run in other processes no move begins (`ControlPlane._unwell`).
        """
        number = self.shard_of(pool)
        return self.shards[number if number < len(self.shards) else 0]

    def owner(self, pool: str) -> RegionIndex:
        """Return the index with the claims in a pool."""
        return self.of_pool(pool).index

    def find(self, name: str) -> Machine | None:
        """Return a machine from the index of its owner."""
        known = self.shards[0].index.machines.get(name)
        return self.owner(known.pool).machines.get(name) if known is not None else None

    def machines(self) -> Iterator[Machine]:
        """Yield all machines, each from the index of its owner."""
        for name, known in list(self.shards[0].index.machines.items()):
            found = self.owner(known.pool).machines.get(name)
            if found is not None:
                yield found

    def claims_of(self, job: str) -> Claims | None:
        """Return what a job claims."""
        found = (index.claims.get(job) for index in self.indexes)
        return next((claims for claims in found if claims is not None), None)

    def entitlement_of(self, spec: JobSpec) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""
        return self.shards[0].entitlement_of(spec)


class Moves(Protocol):
    """Records moves as operations of jobs: the scheduler."""

    async def begin(self, job: str, index: int, to: str, reason: str) -> bool:
        """Request a move of a task within its job's budget; return whether it was recorded."""

    async def withdraw(self, job: str, index: int) -> None:
        """Withdraw a move that has not begun; a begun move continues."""

    def moving(self, job: str, index: int) -> str:
        """Return the target machine of a task's ReBalancer move; empty: it has no such move."""

    def has_begun(self, job: str, index: int) -> bool:
        """Return whether a task's operation is running."""

    def serves_on(self, job: str, index: int) -> str:
        """Return the machine on which a task serves; empty: it does not serve."""

    def waiting(self) -> list[tuple[str, int]]:
        """Return the moves that have not begun."""
