"""Which tasks to add, to drop and to update now, within one availability budget.

Every voluntary operation counts against `update.max_unavailable`, and so do failures: while
that many tasks are not serving, for whatever reason, nothing more is taken down (SC6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from agent.api import Health, TaskState
from control_plane.api.jobs import JobPhase, JobRecord, JobStatus, Placement, TaskPhase, TaskRecord
from control_plane.core.reconcile import View, available

_GOING = (TaskPhase.DRAINING, TaskPhase.STOPPING)


@dataclass(frozen=True, slots=True)
class Updates:
    """Tasks that may be taken down for the new version now, and why not more."""

    indexes: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """Machines for the tasks that asked for one, and why the rest has none."""

    placements: Mapping[int, Placement] = field(default_factory=dict)
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def wanted_tasks(record: JobRecord) -> int:
    """Return how many tasks there shall be."""
    return 0 if record.stopping else record.spec.tasks


def resize(record: JobRecord, now: float) -> JobRecord:
    """Return the record with missing tasks added and surplus ones on their way out.

    The highest indexes go, all at once: nobody counts on them any more. They are drained
    like any other.
    """
    wanted = wanted_tasks(record)
    known = {task.index for task in record.tasks}
    tasks = [
        TaskRecord(index=i, version=record.version, generation=record.generation, since=now)
        for i in range(wanted)
        if i not in known
    ]
    generation = record.generation
    for task in record.tasks:
        if task.index < wanted or task.phase in _GOING:
            tasks.append(task)
        elif task.placement is not None:
            generation += 1
            tasks.append(take_down(task, generation, now))
    tasks.sort(key=lambda task: task.index)
    return replace(record, tasks=tasks, generation=generation)


def next_updates(record: JobRecord, view: View) -> Updates:
    """Return which tasks may be stopped now, in order: outdated ones, and those that must move.

    Tasks that do not serve anyway do not cost availability and come first, so that a bad
    version can be replaced; no more than the budget is in operation at once. Tasks that
    wait for a place or for their machine are not touched.
    """
    wanted = wanted_tasks(record)
    within = [task for task in record.tasks if task.index < wanted]
    outdated = [
        task
        for task in within
        if (task.version != record.version or must_move(task, view))
        and task.phase in (TaskPhase.STARTING, TaskPhase.RUNNING)
        and _reachable(task, view)
    ]
    if not outdated:
        return Updates()
    serving = {task.index for task in within if available(task, view)}
    broken = [task.index for task in outdated if task.index not in serving]
    healthy = [task.index for task in outdated if task.index in serving]
    most = record.spec.update.max_unavailable
    budget = most - (wanted - len(serving))
    slots = most - sum(1 for task in within if _in_operation(task, record.version))
    chosen = broken[: max(0, slots)] + healthy[: max(0, budget)]
    late = {task.index for task in outdated if is_overdue(task, view)}
    chosen = sorted(late) + [index for index in chosen if index not in late]
    reason = ""
    if healthy and budget <= 0 and not any(_is_moving(task) for task in within):
        reason = (
            f"{wanted - len(serving)} of {wanted} tasks are unavailable and at most"
            f" {most} may be; the update waits"
        )
    return Updates(tuple(chosen), reason)


def must_move(task: TaskRecord, view: View) -> bool:
    """Return whether a task has to leave its machine, as far as the budget allows."""
    machine = view.get(task.placement.machine) if task.placement is not None else None
    return machine is not None and machine.leaving


def is_overdue(task: TaskRecord, view: View) -> bool:
    """Return whether a task has to leave its machine now, whatever the budget says."""
    machine = view.get(task.placement.machine) if task.placement is not None else None
    return machine is not None and machine.overdue


def take_down(task: TaskRecord, generation: int, now: float) -> TaskRecord:
    """Return the task on its way out: unlisted and drained first if clients may use it."""
    if task.listed:
        return replace(task, phase=TaskPhase.DRAINING, listed=False, since=now, retry_at=0.0)
    return replace(
        task,
        phase=TaskPhase.STOPPING,
        generation=generation,
        since=now,
        retry_at=0.0,
    )


def begin_updates(record: JobRecord, indexes: set[int], now: float) -> JobRecord:
    """Return the record with these tasks on their way out; they come back as new ones."""
    generation = record.generation
    tasks = []
    for task in record.tasks:
        if task.index in indexes:
            generation += 1
            task = take_down(task, generation, now)
        tasks.append(task)
    return replace(record, tasks=tasks, generation=generation)


def to_place(record: JobRecord, view: View) -> tuple[TaskRecord, ...]:
    """Return the tasks that need a machine: new ones, and those whose machine is down."""

    def needs(task: TaskRecord) -> bool:
        if task.phase is TaskPhase.PENDING:
            return True
        if task.phase is not TaskPhase.LOST or task.placement is None:
            return False
        machine = view.get(task.placement.machine)
        return machine is None or not machine.up

    return tuple(task for task in record.tasks if needs(task))


def apply_plan(record: JobRecord, plan: Placed, now: float) -> JobRecord:
    """Return the record with the plan's placements, each a start of its own generation.

    A task that moves leaves its name behind: should the old machine come back with it, it
    is deleted there before anything else starts (nothing runs twice).
    """
    generation = record.generation
    leaving = {machine: set(ids) for machine, ids in record.leaving.items()}
    tasks = []
    for task in record.tasks:
        placement = plan.placements.get(task.index)
        if placement is not None:
            generation += 1
            if task.placement is not None:
                name = f"{record.name}-{task.index}"
                leaving.setdefault(task.placement.machine, set()).add(name)
            task = TaskRecord(
                index=task.index,
                version=task.version,
                generation=generation,
                phase=TaskPhase.STARTING,
                placement=placement,
                since=now,
            )
        elif task.index in plan.unplaced:
            task = replace(task, reason="; ".join(plan.reasons))
        tasks.append(task)
    left = {machine: sorted(ids) for machine, ids in leaving.items()}
    return replace(record, tasks=tasks, generation=generation, leaving=left)


def prune(record: JobRecord) -> JobRecord:
    """Return the record without specifications that no task runs any more."""
    used = {task.version for task in record.tasks} | {record.version}
    if used >= record.specs.keys():
        return record
    return replace(record, specs={v: s for v, s in record.specs.items() if v in used})


def summarize(record: JobRecord, detail: str = "") -> JobStatus:
    """Return a job as its owner sees it."""
    wanted = wanted_tasks(record)
    running = [t for t in record.tasks if t.state is TaskState.RUNNING and t.index < wanted]
    healthy = [t for t in running if t.health is Health.HEALTHY and t.listed]
    updated = [t for t in running if t.version == record.version]
    waiting = [t for t in record.tasks if t.reason and not t.listed and t.index < wanted]
    if record.stopping:
        phase = JobPhase.STOPPING
    elif len(healthy) == len(record.tasks) == wanted == len(updated):
        phase = JobPhase.STABLE
    elif detail or any(_is_stuck(t) for t in waiting):
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


def _is_stuck(task: TaskRecord) -> bool:
    return task.placement is None or task.phase is TaskPhase.LOST or task.retry_at > 0


def _in_operation(task: TaskRecord, newest: int) -> bool:
    starting = task.phase in (TaskPhase.PENDING, TaskPhase.STARTING)
    return task.phase in _GOING or (starting and task.version == newest)


def _is_moving(task: TaskRecord) -> bool:
    """Return whether a task is on its way and nothing is known to be in it."""
    if task.phase is TaskPhase.STARTING:
        stuck = task.health is Health.UNHEALTHY or task.state in (
            TaskState.BACKOFF,
            TaskState.FAILED,
            TaskState.STOPPED,
        )
        return not stuck and not task.reason
    return task.phase in _GOING or (task.phase is TaskPhase.PENDING and not task.reason)


def _reachable(task: TaskRecord, view: View) -> bool:
    if task.placement is None:
        return False
    machine = view.get(task.placement.machine)
    return machine is not None and machine.up and machine.answering
