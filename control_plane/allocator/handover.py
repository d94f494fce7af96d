"""Hands a pool over from one allocator of this process to another (docs/adr/0152).

Both use the same store, so the records of the pool's allocations are read, not copied. No shard may
allocate for the pool meanwhile: the caller stops that, and waits with `is_busy` until running
allocations have ended. Then it calls `read`, writes the new owner, and calls `drop` and `adopt` in
one step of the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from control_plane.allocator.allocator import Allocator
from control_plane.allocator.core.allocation_record import restoring
from control_plane.allocator.core.claims import Change
from control_plane.allocator.stored import Stored
from control_plane.broker.core.assignment import FREE


def is_busy(allocator: Allocator, pool: str, jobs: Collection[str]) -> bool:
    """Return whether an allocation of these jobs runs, or a machine of their pool is given back.

    True also while any machine is being taken: its pool is unknown until its broker confirms it.
    """
    return allocator.allocations.is_under_way(jobs) or any(
        record.machine in allocator.releases for record in allocator.broker.held(pool)
    )


async def read(allocator: Allocator, jobs: Collection[str]) -> list[Stored]:
    """Return the stored allocations of jobs; changes nothing."""
    found = [await allocator.allocations.stored.read(job) for job in sorted(jobs)]
    return [stored for stored in found if stored is not None]


def drop(allocator: Allocator, jobs: Collection[str]) -> None:
    """Remove the claims of jobs from an allocator, because another allocator now has them.

    Nothing is written, and no machine is given back. The room becomes free in this allocator's
    index only, and this allocator plans for its own pools only.
    """
    index = allocator.index
    for job in jobs:
        claims = index.claims.get(job)
        if claims is not None:
            change = Change(job, claims.pool, freed=list(claims))
            index.reserve(change)
            index.settle(change)
        allocator.allocations.forget_answer(job)
        allocator.allocations.stored.forget(job)
        allocator.waiting.drop(job)


def adopt(allocator: Allocator, pool: str, stored: Sequence[Stored], step: int = 1 << 20) -> None:
    """Restore the allocations of a pool's jobs that `read` returned."""
    for one in stored:
        allocator.allocations.stored.note(one)
        for _ in restoring(one.record, allocator.index, step):
            pass
    allocator.refresh([record.machine for record in allocator.broker.held(pool)])
    allocator.index.note_gain(FREE)
