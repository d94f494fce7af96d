"""A job's record as a request to the allocator, and the answer back into the record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord
from control_plane.api.policy import Admission, Preference
from control_plane.core.feasibility import Demand, demand_of
from control_plane.core.planner import Group, Request, same_claim
from control_plane.core.preferences import DEFAULT
from control_plane.core.reconcile import View, spec_of
from control_plane.core.region_index import Claims
from control_plane.core.rollout import Placed, to_place


@dataclass(frozen=True, slots=True)
class Answer:
    """What the allocator said: the job's claims, and the tasks that have none."""

    claims: Claims | None
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def request_of(
    record: JobRecord,
    view: View,
    pool: str,
    entitlement: EntitlementSpec | None,
    claims: Claims | None = None,
) -> Request:
    """Return what a job needs of the allocator: every task that has, or shall have, a machine.

    Tasks that are being updated keep theirs, so that nobody takes it while they restart. As
    long as they can, and the new version claims the same, they are asked for as if they ran:
    so the request is that of before the update, to which the answer is known (AL13).
    """
    waiting = {task.index: task for task in to_place(record, view)}
    demands: dict[int, Demand] = {}
    same: dict[int, int] = {}
    """Version → the first one that claims the same."""
    alike: dict[tuple[int, str, str, bool], list[int]] = defaultdict(list)
    for task in record.tasks:
        version = task.version
        if version not in same:
            demand = demand_for(spec_of(record, task), entitlement)
            same[version] = next((v for v, d in demands.items() if d == demand), version)
            demands.setdefault(same[version], demand)
        version = same[version]
        alike[_kind(task, version, demands[version], waiting, claims)].append(task.index)
    groups = tuple(
        Group(demands[version], tuple(tasks), leave=leave, avoid=avoid, running=running)
        for (version, leave, avoid, running), tasks in alike.items()
    )
    return Request(
        job=record.name,
        pool=pool,
        groups=groups,
        preferences=preferences_of(record.spec, entitlement),
        gang=record.spec.admission is Admission.GANG,
    )


def _kind(
    task: TaskRecord,
    version: int,
    demand: Demand,
    waiting: dict[int, TaskRecord],
    claims: Claims | None,
) -> tuple[int, str, str, bool]:
    """Return what tasks have in common that can be placed together."""
    if task.phase is TaskPhase.PENDING:
        if claims is not None and _may_stay(task, demand, claims):
            return (version, "", "", True)
        return (version, "", task.avoid, False)
    leave = task.placement.machine if task.index in waiting and task.placement else ""
    return (version, leave, "", True)


def _may_stay(task: TaskRecord, demand: Demand, claims: Claims) -> bool:
    """Return whether a task that does not run may start again right where its claim is."""
    claim = claims.get(task.index)
    return (
        claim is not None
        and same_claim(claim.demand, demand)
        and claim.machine.pool == claims.pool
        and not claim.machine.blocked
        and claim.machine.name != task.avoid
    )


def demand_for(spec: JobSpec, entitlement: EntitlementSpec | None) -> Demand:
    """Return what a task claims, in the data center to which its entitlement is pinned."""
    return demand_of(spec, entitlement.datacenter if entitlement is not None else None)


def preferences_of(spec: JobSpec, entitlement: EntitlementSpec | None) -> tuple[Preference, ...]:
    """Return the soft preferences of a job: its own, its entitlement's, or the region's."""
    if spec.preferences is not None:
        return tuple(spec.preferences)
    if entitlement is not None and entitlement.preferences is not None:
        return tuple(entitlement.preferences)
    return DEFAULT


def answer_of(record: JobRecord, view: View, answer: Answer) -> Placed:
    """Return the machines of the tasks that waited for one."""
    placements = {}
    missing = set(answer.unplaced)
    for task in to_place(record, view):
        claim = answer.claims.get(task.index) if answer.claims is not None else None
        if claim is None or task.index in missing:
            continue
        if task.placement is not None and task.placement.machine == claim.machine.name:
            continue
        placements[task.index] = Placement(machine=claim.machine.name, ports=claim.ports or {})
    return Placed(placements, answer.unplaced, answer.reasons)
