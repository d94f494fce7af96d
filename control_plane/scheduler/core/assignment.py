"""Applies the composed intents to tasks: the version of each, and which tasks come or go."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.agents.core.observed import View
from control_plane.allocator.core.spread import fullest_first
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.job_control.core.compose import (
    ILL,
    NEXT_PUSH,
    NOWHERE,
    SERVES,
    SILENT,
    Assigned,
    Infrastructure,
    JobWants,
    TaskSeen,
    UnifiedSpec,
    Why,
    compose,
)
from control_plane.job_control.core.intents import (
    is_plain,
    on_its_way_to,
    runtime_of,
    wanted_of,
    writes_of,
)
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.operations import is_being_removed
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import UNPLACED, must_move
from control_plane.scheduler.core.task_versions import is_held_back


def unified(record: JobRecord, inputs: DecisionInput) -> UnifiedSpec:
    """Return a job's intents composed for its tasks as they are observed now."""
    staying = [task for task in record.tasks if not (is_being_removed(task) or task.extra)]
    wanted = wanted_of(record)
    costs = [_removal_cost(task, inputs.view) for task in staying]
    ranks = _ranks(record, staying, costs, inputs)
    last = len(staying)
    tasks = [
        TaskSeen(task.index, on_its_way_to(record, task), cost, ranks.get(task.index, last))
        for task, cost in zip(staying, costs, strict=True)
    ]
    return compose(wanted, tasks, _infrastructure(record, wanted, inputs), inputs.now.wall)


def unified_summary(record: JobRecord, inputs: DecisionInput) -> UnifiedSpec:
    """Return what `unified` returns, without the removed tasks and the indexes of new ones.

    All tasks of a plain job run the same version, so nothing has to be composed.
    """
    if not is_plain(record):
        return unified(record, inputs)
    size, runtime, waits = record.spec.tasks, record.spec.runtime, dict[Dimension, str]()
    if runtime_of(record) not in ("", runtime):
        waits[Dimension.INFRASTRUCTURE] = NEXT_PUSH
    alike = dict.fromkeys(range(size), Assigned(record.version, Why.PUSH))
    return UnifiedSpec(size, alike, runtime=runtime, waits=waits)


def with_wanted_versions(record: JobRecord, spec: UnifiedSpec) -> JobRecord:
    """Return the record with the wanted version of each task (`wants`)."""
    plain = is_plain(record)
    if plain and not record.composed:
        return record
    tasks = [
        task
        if (wants := 0 if plain else _wanted_version(record, task, spec)) == task.wants
        else replace(task, wants=wants)
        for task in record.tasks
    ]
    return replace(record, tasks=tasks, composed=0 if plain else writes_of(record))


def _wanted_version(record: JobRecord, task: TaskRecord, spec: UnifiedSpec) -> int:
    """Return the wanted version of one task.

    A task of an ended trial goes back to the base version while canaries of a push are tested.
    """
    found = spec.tasks.get(task.index)
    if found is None or task.extra:
        return 0
    was_on_trial = on_its_way_to(record, task) in record.trials
    if was_on_trial and found.why is Why.PUSH and is_held_back(record) and record.rollout:
        return record.rollout.base
    return found.version


def _infrastructure(record: JobRecord, wanted: JobWants, inputs: DecisionInput) -> Infrastructure:
    taken = frozenset(task.index for task in record.tasks if is_being_removed(task) or task.extra)
    if wanted.canary is None:
        return Infrastructure(taken=taken)
    types = {claim.task: claim.machine.capacity.machine_type for claim in inputs.claims}
    leaving = frozenset(task.index for task in record.tasks if must_move(task, inputs.view))
    return Infrastructure(types, leaving, taken)


def _removal_cost(task: TaskRecord, view: View) -> int:
    """Return how much removing a task would cost: one of the constants of `compose`."""
    if task.phase in UNPLACED:
        return NOWHERE
    if task.phase is not TaskPhase.RUNNING or not task.listed:
        return ILL
    return SERVES if available(task, view) else SILENT


def _ranks(
    record: JobRecord, staying: Sequence[TaskRecord], costs: Sequence[int], inputs: DecisionInput
) -> dict[int, int]:
    """Return the order of removal among tasks of equal cost: from the fullest bins first."""
    surplus = len(staying) - record.spec.tasks
    if surplus <= 0 or inputs.even_spread is None:
        return {}
    for cost in (NOWHERE, ILL, SILENT, SERVES):
        alike = [task for task, value in zip(staying, costs, strict=True) if value == cost]
        if len(alike) >= surplus:
            break
        surplus -= len(alike)
    ranks: dict[int, int] = {}
    versions = {task.index: on_its_way_to(record, task) for task in alike}
    for version in set(versions.values()):
        indexes = {index for index, value in versions.items() if value == version}
        claims = [claim for claim in inputs.claims if claim.task in indexes]
        fullest = fullest_first(claims, inputs.even_spread, surplus, for_good=True)
        ranks |= {index: rank for rank, index in enumerate(fullest)}
    return ranks
