"""Finds jobs in transfer between entitlements, which must stay in one shard meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from control_plane.api.jobs import JobRecord, entitlements_of
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.assignment import FREE


def in_transfer(
    names: set[str],
    jobs: Iterable[JobRecord],
    left: Iterable[str],
    machine: Callable[[str], MachineRecord | None],
    job: Callable[[str], JobRecord | None],
) -> tuple[str, set[str]] | None:
    """Return a job in transfer between a pool and other entitlements, and these; None: no job is.

    `names` are the entitlements of the pool, `jobs` the jobs in them, and `left` the tasks whose
    copies remain on machines of the pool. A transfer lasts until no copy remains in the other
    entitlement: only a shard that owns both can end such a copy (BUG-CP62).
    """
    for record in jobs:
        places = [machine(name) for name in record.leaving]
        others = {place.entitlement for place in places if place is not None} - {FREE}
        if others := (others | entitlements_of(record)) - names:
            return record.name, others
    for task in left:
        owner = job(task.rpartition("-")[0])
        if owner is not None and owner.spec.entitlement not in names:
            return owner.name, {owner.spec.entitlement}
    return None
