"""Turns a job's record into a request to the allocator, and the answer into placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from control_plane.agents.core.observed import View
from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.demand import Demand, demand_for
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.request import Allocation, Group, Request, same_claim
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, Placement, TaskPhase, TaskRecord
from control_plane.api.policy import Admission
from control_plane.api.requirements import In
from control_plane.scheduler.core.operations import machine_of
from control_plane.scheduler.core.owner_moves import wanted_machine
from control_plane.scheduler.core.rollout import PlacementResult, tasks_to_place
from control_plane.scheduler.core.task_versions import placement_version


@dataclass(frozen=True, slots=True)
class VersionPool:
    """Where tasks of a version run."""

    pool: str
    entitlement: EntitlementSpec | None


_NOWHERE: Mapping[int, VersionPool] = {}


def request_of(
    record: JobRecord,
    view: View,
    pool: str,
    entitlement: EntitlementSpec | None,
    claims: Claims | None = None,
    version_pools: Mapping[int, VersionPool] = _NOWHERE,
) -> Request:
    """Return a job's request to the allocator: for every task that has, or needs, a machine.

    Tasks that are being updated keep their machine, so that no other job takes it while they
    restart. If they can stay and the new version claims the same, they are requested as running:
    so the request equals the one before the update, whose answer is known (AL13).

    `homes` has the versions in another entitlement. New placements are made in `pool`, as the
    newest version; tasks that run in the other entitlement stay until they are taken down.
    """
    waiting = {task.index: task for task in tasks_to_place(record, view)}
    versions = {
        task.index: placement_version(record, task) if task.index in waiting else task.version
        for task in record.tasks
    }
    same, demands = _claims_of(record, dict.fromkeys(versions.values()), entitlement, version_pools)
    alike: dict[tuple[tuple[int, bool, str, bool], str], list[int]] = defaultdict(list)
    left = frozenset(machine_of(task) for task in waiting.values()) - {""}
    for task in record.tasks:
        version = same[versions[task.index]]
        to = wanted_machine(task) if task.phase is TaskPhase.PENDING else ""
        alike[_kind(task, version, demands[version], waiting, claims), to].append(task.index)
    groups = tuple(
        Group(
            demands[version],
            tuple(tasks),
            leave=left if leaves else frozenset(),
            avoid=avoid,
            running=running,
            among=only_on(to),
            elsewhere=version_pools[version].pool if version in version_pools else "",
        )
        for ((version, leaves, avoid, running), to), tasks in alike.items()
    )
    return Request(
        job=record.name,
        pool=pool,
        groups=groups,
        preferences=preferences_of(record.spec, entitlement),
        fit=record.spec.fit,
        gang=record.spec.admission is Admission.GANG,
    )


def _claims_of(
    record: JobRecord,
    versions: Iterable[int],
    entitlement: EntitlementSpec | None,
    version_pools: Mapping[int, VersionPool],
) -> tuple[dict[int, int], dict[int, Demand]]:
    """Return for each version the first one with the same claim, and the claims of the latter."""
    same, demands = dict[int, int](), dict[int, Demand]()
    for version in versions:
        version_pool = version_pools.get(version)
        spec = record.specs.get(version, record.spec)
        demand = demand_for(spec, version_pool.entitlement if version_pool else entitlement)
        alike = (
            v for v, d in demands.items() if d == demand and version_pools.get(v) == version_pool
        )
        same[version] = next(alike, version)
        demands.setdefault(same[version], demand)
    return same, demands


def only_on(machine: str) -> tuple[In, ...]:
    """Return the requirement of a task that is wanted on one machine; none for an empty name."""
    return (In("machine", frozenset({machine})),) if machine else ()


def _kind(
    task: TaskRecord,
    version: int,
    demand: Demand,
    waiting: dict[int, TaskRecord],
    claims: Claims | None,
) -> tuple[int, bool, str, bool]:
    """Return a key that is equal for tasks that can be placed together."""
    if task.phase is TaskPhase.PENDING:
        if claims is not None and _may_stay(task, demand, claims):
            return (version, False, "", True)
        return (version, False, task.avoid, False)
    leaves = task.index in waiting and task.placement is not None
    return (version, leaves, "", True)


def _may_stay(task: TaskRecord, demand: Demand, claims: Claims) -> bool:
    """Return whether a task that does not run may start again on the machine of its claim."""
    claim = claims.get(task.index)
    return (
        claim is not None
        and same_claim(claim.demand, demand)
        and claim.machine.pool == claims.pool
        and not claim.machine.blocked
        and claim.machine.name != task.avoid
    )


def placed(record: JobRecord, view: View, answer: Allocation) -> PlacementResult:
    """Return the machines of the tasks that waited for one, by the allocator's answer."""
    placements = {}
    missing = set(answer.unplaced)
    for task in tasks_to_place(record, view):
        claim = answer.claims.get(task.index) if answer.claims is not None else None
        if claim is None or task.index in missing:
            continue
        if task.placement is not None and task.placement.machine == claim.machine.name:
            continue
        placements[task.index] = Placement(machine=claim.machine.name, ports=claim.ports or {})
    return PlacementResult(placements, answer.unplaced, answer.reasons)
