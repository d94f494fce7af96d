"""Jobs in transfer between entitlements: both entitlements have to stay in one shard meanwhile."""

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
    """Return a job between entitlements of one pool and others, and those others, if there is one.

    `names` are the entitlements of the pool, `jobs` those in them, and `left` the tasks that left
    copies on its machines. A transfer lasts until no copy is left in the other entitlement: only a
    shard that owns both ends such a copy (BUG-CP62).
    """
    for record in jobs:
        places = [machine(name) for name in record.leaving]
        others = {place.entitlement for place in places if place is not None} - {FREE}
        if others := (others | entitlements_of(record)) - names:
            return record.name, others
    for task in left:
        found = job(task.rpartition("-")[0])
        if found is not None and found.spec.entitlement not in names:
            return found.name, {found.spec.entitlement}
    return None
