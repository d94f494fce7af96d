"""Changes and queries of a job's tasks: stop, place, and the status for the owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from agent.api import Health, TaskState
from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.api.jobs import (
    JobPhase,
    JobRecord,
    JobStatus,
    Placement,
    TaskPhase,
    TaskRecord,
    spec_of,
    task_id,
)
from control_plane.api.operations import MUST_LEAVE, Cause, OperationState
from control_plane.job_control.core.intents import (
    canary_of,
    is_composed,
    is_held,
    is_plain,
    target_of,
)
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import LeftBehind, ended_in_s, reason_to_wait
from control_plane.scheduler.core.job_check import same_tasks
from control_plane.scheduler.core.new_tasks import TROUBLE
from control_plane.scheduler.core.operations import ENDING, is_being_removed, waits
from control_plane.scheduler.core.owner_moves import without_wanted_machine
from control_plane.scheduler.core.task_versions import is_passed_over, placement_version

UNPLACED = (TaskPhase.PENDING, TaskPhase.LOST)
"""Phases in which a task may need a machine."""


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """The machines of tasks that needed one, and why the other tasks have none."""

    placements: Mapping[int, Placement] = field(default_factory=dict)
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def wanted_tasks(record: JobRecord) -> int:
    """Return how many tasks are wanted; 0 while the job is stopping."""
    return 0 if record.stopping else record.spec.tasks


def host_of(task: TaskRecord, view: View) -> ObservedMachine | None:
    """Return the observed machine of a task, if it has one and that is known."""
    return view.get(task.placement.machine) if task.placement is not None else None


def must_move(task: TaskRecord, view: View) -> bool:
    """Return whether a task has to leave its machine, as far as the budget allows."""
    machine = host_of(task, view)
    return machine is not None and machine.leaving


def is_overdue(task: TaskRecord, view: View) -> bool:
    """Return whether a task has to leave its machine now, regardless of the budget."""
    machine = host_of(task, view)
    return machine is not None and machine.overdue


def take_down(task: TaskRecord, generation: int, now: Moment) -> TaskRecord:
    """Return the task with its stop begun: unlisted and drained first if clients may call it."""
    if task.listed:
        task = replace(task, phase=TaskPhase.DRAINING, listed=False)
    else:
        task = replace(task, phase=TaskPhase.STOPPING, generation=generation)
    return replace(task, since=now.wall, begun=now.steady, retry_at=0.0)


def tasks_to_place(record: JobRecord, view: View) -> tuple[TaskRecord, ...]:
    """Return the tasks that need a machine: new ones, and those whose machine is down.

    A task that must have no second copy is included only once the first has certainly ended.
    """

    def needs(task: TaskRecord) -> bool:
        if reason_to_wait(
            record, task, record.specs.get(placement_version(record, task), record.spec)
        ):
            return False
        if task.phase is TaskPhase.PENDING:
            return not is_passed_over(record, task)
        if task.placement is None or _awaits_approval(record, task):
            return False
        machine = view.get(task.placement.machine)
        if machine is not None and (machine.up or machine.excused):
            return False
        name = task_id(record.name, task.index)
        return ended_in_s(spec_of(record, task), name, machine) == 0.0

    return tuple(task for task in record.tasks if task.phase in UNPLACED and needs(task))


def _awaits_approval(record: JobRecord, task: TaskRecord) -> bool:
    """Return whether a lost task waits for its controller's approval to move."""
    operation = task.operation
    return (
        record.spec.controller is not None
        and not record.stopping
        and operation is not None
        and operation.state is OperationState.OFFERED
    )


def with_placements(record: JobRecord, plan: PlacementResult, now: Moment) -> JobRecord:
    """Return the record with the plan's placements, each a start with a new generation.

    A moving task's id is recorded for its old machine. If that machine returns with the task, it
    is deleted there before anything else starts, so that no task runs twice.
    """
    if not plan.placements and not plan.unplaced:
        return record
    generation = record.generation
    left, tasks = LeftBehind(record), list[TaskRecord]()
    for task in record.tasks:
        placement = plan.placements.get(task.index)
        if placement is not None:
            generation += 1
            left.add(task)
            task = TaskRecord(
                index=task.index,
                version=placement_version(record, task),
                generation=generation,
                phase=TaskPhase.STARTING,
                placement=placement,
                since=now.wall,
                begun=now.steady,
                operation=task.operation,
                extra=task.extra,
            )
        elif task.index in plan.unplaced:
            reason = "; ".join(plan.reasons)
            task = without_wanted_machine(task)
            task = task if task.reason == reason else replace(task, reason=reason)
        tasks.append(task)
    return replace(left.into(record), tasks=tasks, generation=generation)


def earlier(record: JobRecord) -> int | None:
    """Return the newest earlier version whose tasks run something else; None: none is known."""
    others = (v for v in record.specs if v < record.version and v not in record.trials)
    return max((v for v in others if not same_tasks(record.specs[v], record.spec)), default=None)


def without_unused_specs(record: JobRecord) -> JobRecord:
    """Return the record without specifications that no task runs any more.

    The newest one whose tasks run something else is kept, for a rollback.
    """
    used = {task.version for task in record.tasks} | {record.version}
    if used >= record.specs.keys() and not record.trials:
        return record
    if record.trials:
        canary = canary_of(record)
        used |= {canary.version} if canary is not None else set()
        record = replace(record, trials=tuple(v for v in record.trials if v in used))
    if (before := earlier(record)) is not None:
        used.add(before)
    if record.rollout is not None:
        used.add(record.rollout.base)
    if used >= record.specs.keys():
        return record
    return replace(record, specs={v: s for v, s in record.specs.items() if v in used})


def summarize(record: JobRecord, detail: str = "") -> JobStatus:
    """Return the status of a job for its owner."""
    wanted = wanted_tasks(record)
    staying = [] if record.stopping else [t for t in record.tasks if not is_being_removed(t)]
    running = [t for t in staying if t.state is TaskState.RUNNING]
    healthy = [t for t in running if t.health is Health.HEALTHY and t.listed]
    updated = [t for t in running if t.version == record.version]
    waiting = [t for t in staying if t.reason and not t.listed]
    otherwise = record.version if is_plain(record) else 0  # computed once, not for each task
    right = sum(1 for t in running if t.version == (t.wants or otherwise or t.version))
    is_full = is_composed(record) and len(healthy) == len(record.tasks) == wanted == right
    is_full = is_full and not (detail and is_held(record))
    if record.stopping:
        phase = JobPhase.STOPPING
    elif is_full and not (detail and any(_should_leave(task) for task in staying)):
        phase = JobPhase.STABLE
    elif detail or any(_has_obstacle(t) for t in waiting):
        phase = JobPhase.WAITING
    else:
        phase = JobPhase.PROGRESSING
    if waiting and not detail:
        detail = f"task {waiting[0].index}: {waiting[0].reason}"
    return JobStatus(
        record=record,
        phase=phase,
        wanted=wanted,
        running=len(running),
        healthy=len(healthy),
        updated=len(updated),
        detail=detail,
    )


def _has_obstacle(task: TaskRecord) -> bool:
    return task.placement is None or task.phase is TaskPhase.LOST or task.retry_at > 0


def _should_leave(task: TaskRecord) -> bool:
    """Return whether a task waits to leave a machine that is needed for something else."""
    return waits(task) and task.operation is not None and task.operation.cause in MUST_LEAVE


def is_moving(task: TaskRecord) -> bool:
    """Return whether a task is starting, stopping or waiting, without a known obstacle."""
    if task.phase is TaskPhase.STARTING:
        stuck = task.health is Health.UNHEALTHY or task.state in TROUBLE
        return not stuck and not task.reason
    return task.phase in ENDING or (task.phase is TaskPhase.PENDING and not task.reason)


def is_quiet(record: JobRecord) -> bool:
    """Return whether a job is in its wanted state, with no operations except rebalancing moves."""
    newest = record.version if is_plain(record) else 0
    return (
        len(record.tasks) == wanted_tasks(record)
        and not record.leaving
        and all(
            task.listed
            and task.version == (newest if newest and not task.wants else target_of(record, task))
            and task.phase is TaskPhase.RUNNING
            and (task.operation is None or task.operation.cause is Cause.REBALANCE)
            for task in record.tasks
        )
    )
