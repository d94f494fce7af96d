"""The number of a job's tasks: missing tasks are added, surplus ones are removed in turn."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.agents.core.seen import View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationState
from control_plane.job_control.core.compose import UnifiedSpec
from control_plane.job_control.core.intents import is_plain, target_of
from control_plane.scheduler.core.approval import is_controlled, was_let
from control_plane.scheduler.core.assignment import assigned, unified
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import waits_for
from control_plane.scheduler.core.decision import Decision, Seen
from control_plane.scheduler.core.operations import (
    ENDING,
    Ledger,
    approval,
    is_going,
    is_let,
    waits,
)
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import is_overdue, take_down, wanted_tasks
from control_plane.scheduler.core.task_versions import is_held_back, starts_as


def remaining(record: JobRecord, seen: Seen) -> tuple[int, ...]:
    """Return the indexes of the tasks that a job will have at its wanted size."""
    made = Decision(record, Ledger(record, seen.now))
    made.record = kept(made)
    after = resized(made, seen)
    return tuple(task.index for task in after.tasks if not (is_going(task) or task.extra))


def resized(made: Decision, seen: Seen) -> JobRecord:
    """Return the record with missing tasks added and the removal of surplus ones begun.

    A task keeps its index for life, so a job may have holes in its indexes: new tasks
    get the lowest free ones. The composed intents say which tasks are surplus and what each runs.
    Surplus tasks are removed all at once, and drained like any other.
    """
    record, now = made.record, seen.now
    if record.stopping:
        made.record = record = _with_newest(record)
        everything = frozenset(task.index for task in record.tasks if not is_going(task))
        return without(made, everything, now) if everything else record
    staying = sum(1 for task in record.tasks if not (is_going(task) or task.extra))
    if staying == record.spec.tasks and is_plain(record):
        return _with_newest(assigned(record, UnifiedSpec(staying, {})))
    spec = unified(record, seen)
    record = made.record = _with_newest(assigned(record, spec))
    if spec.removed:
        return without(made, spec.removed, now)
    known = {task.index for task in record.tasks}
    new = [index for index in spec.tasks if index not in known]
    return replace(record, tasks=_with_new(record, new, spec, now)) if new else record


def without(made: Decision, surplus: frozenset[int], now: Moment) -> JobRecord:
    """Return the record with the removal of some tasks begun, or offered to the controller.

    A controller is asked about tasks that serve, and those that it released for another operation:
    an acknowledged update does not allow a removal.
    """
    record, ledger = made.record, made.ledger
    generation, tasks = record.generation, list[TaskRecord]()
    asks = is_controlled(record)
    for task in record.tasks:
        if task.index in surplus:
            is_down = task.phase in ENDING
            is_lent = asks and was_let(task) and task.phase is not TaskPhase.LOST
            if is_lent and (is_down or (task.placement is None and not task.reason)):
                tasks.append(task)  # it was released to return: its removal is offered then
                continue
            if task.placement is None:
                continue
            if asks and (task.listed or is_lent):
                tasks.append(ledger.removing(task, record, OperationState.OFFERED))
                continue
            task = ledger.removing(task, record)
            if not is_down:
                generation += 1
                task = take_down(task, generation, now)
        tasks.append(task)
    return replace(record, tasks=tasks, generation=generation)


def _with_newest(record: JobRecord) -> JobRecord:
    """Return the record in which tasks that wait for a machine have the version they are to run.

    They do not run, so no update has to take them down. The newest version may not need the
    resource that they wait for (BUG-AL1). While that version is with its
    canaries, or halted, none of them gets it. A lost task keeps the version that it was
    started with until it is placed elsewhere (`placed_as`): its old copy may run (BUG-CP30).
    """
    plain = is_plain(record)
    if plain and (
        all(task.version == record.version for task in record.tasks) or is_held_back(record)
    ):
        return record

    generation, held_back = record.generation, is_held_back(record)

    def wants(task: TaskRecord) -> TaskRecord:
        nonlocal generation
        if task.phase is not TaskPhase.PENDING or is_going(task):
            return task
        version = record.version if plain else target_of(record, task)
        if task.version == version or (held_back and version == record.version):
            return task
        if waits_for(record, task, record.specs.get(version, record.spec)):
            return task
        generation += 1
        changed = {"version": version, "generation": generation}
        return replace(task, reason="", attempts=0, **changed)

    tasks = [wants(task) for task in record.tasks]
    return replace(record, tasks=tasks, generation=generation)


def goes_on(task: TaskRecord, view: View) -> bool:
    """Return whether a task serves, and its machine does not force it out now."""
    return available(task, view) and not is_overdue(task, view)


def begin_removals(made: Decision, seen: Seen, spare: int) -> JobRecord:
    """Return the record with approved or overdue removals begun.

    At most `spare` serving extra tasks are removed: the rest replace tasks that do not serve.
    """
    record, ledger, generation = made.record, made.ledger, made.record.generation
    asks, tasks = is_controlled(record), list[TaskRecord]()
    for task in record.tasks:
        if is_going(task) and waits(task):
            forced = is_overdue(task, seen.view)
            stands_in = task.extra and goes_on(task, seen.view)
            if forced or (is_let(task) and (spare > 0 or not stands_in)):
                spare -= stands_in
                generation += 1
                approved = approval(task, asks=asks, forced=forced)
                task = ledger.to(task, OperationState.RUNNING, approved=approved)
                task = take_down(task, generation, seen.now)
        tasks.append(task)
    if generation == record.generation:
        return record
    return replace(record, tasks=tasks, generation=generation)


def kept(made: Decision) -> JobRecord:
    """Return the record with waiting removals withdrawn of tasks that are wanted again."""
    record = made.record
    waiting = [t for t in record.tasks if is_going(t) and waits(t) and not t.extra]
    staying = sum(1 for task in record.tasks if not (is_going(task) or task.extra))
    kept = {task.index for task in waiting[: max(0, wanted_tasks(record) - staying)]}
    if not kept:
        return record
    reason = "the task is wanted again"
    tasks = [
        made.ledger.close(task, OperationState.WITHDRAWN, reason) if task.index in kept else task
        for task in record.tasks
    ]
    return replace(record, tasks=tasks)


def _with_new(
    record: JobRecord, new: Sequence[int], spec: UnifiedSpec, now: Moment
) -> list[TaskRecord]:
    plain, tasks = is_plain(record), list(record.tasks)
    for index in new:
        version = spec.tasks[index].version
        tasks.append(
            TaskRecord(
                index=index,
                version=starts_as(record) if version == record.version else version,
                generation=record.generation,
                since=now.wall,
                begun=now.steady,
                wants=0 if plain else version,
            )
        )
    tasks.sort(key=lambda task: task.index)
    return tasks
