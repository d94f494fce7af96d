"""Turns a job's record into a request to the allocator, and the answer into placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.demand import Demand, demand_for
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.request import Group, Request, same_claim
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, Placement, TaskPhase, TaskRecord
from control_plane.api.policy import Admission
from control_plane.api.requirements import In
from control_plane.scheduler.core.owner_moves import goes_to
from control_plane.scheduler.core.rollout import Placed, to_place
from control_plane.scheduler.core.task_versions import placed_as


@dataclass(frozen=True, slots=True)
class Home:
    """Where tasks of a version run."""

    pool: str
    entitlement: EntitlementSpec | None


_NOWHERE: Mapping[int, Home] = {}


@dataclass(frozen=True, slots=True)
class Answer:
    """The allocator's answer: the job's claims, and the tasks that have none."""

    claims: Claims | None
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def request_of(
    record: JobRecord,
    view: View,
    pool: str,
    entitlement: EntitlementSpec | None,
    claims: Claims | None = None,
    homes: Mapping[int, Home] = _NOWHERE,
) -> Request:
    """Return a job's request to the allocator: for every task that has, or needs, a machine.

    Tasks that are being updated keep their machine, so that no other job takes it while they
    restart. If they can stay and the new version claims the same, they are requested as running:
    so the request equals the one before the update, whose answer is known (AL13).

    `homes` has the versions in another entitlement. New placements are made in `pool`, as the
    newest version; tasks that run in the other entitlement stay until they are taken down.
    """
    waiting = {task.index: task for task in to_place(record, view)}
    demands: dict[int, Demand] = {}
    same: dict[int, int] = {}
    """Version → the first version with the same claim."""
    alike: dict[tuple[tuple[int, bool, str, bool], str], list[int]] = defaultdict(list)
    left = frozenset(
        task.placement.machine for task in waiting.values() if task.placement is not None
    )
    for task in record.tasks:
        version = placed_as(record, task) if task.index in waiting else task.version
        if version not in same:
            home = homes.get(version)
            demand = demand_for(
                record.specs.get(version, record.spec), home.entitlement if home else entitlement
            )
            alikes = (v for v, d in demands.items() if d == demand and homes.get(v) == home)
            same[version] = next(alikes, version)
            demands.setdefault(same[version], demand)
        version = same[version]
        to = goes_to(task) if task.phase is TaskPhase.PENDING else ""
        alike[_kind(task, version, demands[version], waiting, claims), to].append(task.index)
    groups = tuple(
        Group(
            demands[version],
            tuple(tasks),
            leave=left if leaves else frozenset(),
            avoid=avoid,
            running=running,
            among=(In("machine", frozenset({to})),) if to else (),
            elsewhere=homes[version].pool if version in homes else "",
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
