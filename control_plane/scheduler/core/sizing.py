"""Brings a job to its wanted number of tasks: adds missing tasks and removes surplus ones."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.agents.core.observed import View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationState
from control_plane.job_control.core.compose import UnifiedSpec
from control_plane.job_control.core.intents import is_plain, target_of
from control_plane.scheduler.core.approval import has_acknowledged_operation, is_controlled
from control_plane.scheduler.core.assignment import unified, with_wanted_versions
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import reason_to_wait
from control_plane.scheduler.core.decision import Decision, DecisionInput
from control_plane.scheduler.core.operations import (
    ENDING,
    OperationLedger,
    approval,
    is_acknowledged,
    is_being_removed,
    waits,
)
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import is_overdue, take_down, wanted_tasks
from control_plane.scheduler.core.task_versions import is_held_back, version_of_new_tasks


def remaining_tasks(record: JobRecord, inputs: DecisionInput) -> tuple[int, ...]:
    """Return the indexes of the tasks that a job will have at its wanted size."""
    decision = Decision(record, OperationLedger(record, inputs.now))
    decision.record = with_withdrawn_removals(decision)
    after = with_wanted_size(decision, inputs)
    return tuple(task.index for task in after.tasks if not (is_being_removed(task) or task.extra))


def with_wanted_size(decision: Decision, inputs: DecisionInput) -> JobRecord:
    """Return the record with missing tasks added and the removal of surplus ones begun.

    A task keeps its index for life, so a job may have holes in its indexes: new tasks
    get the lowest free ones. The composed intents say which tasks are surplus and what each runs.
    Surplus tasks are removed all at once, and drained like any other.
    """
    record, now = decision.record, inputs.now
    if record.stopping:
        decision.record = record = _with_newest(record)
        everything = frozenset(task.index for task in record.tasks if not is_being_removed(task))
        return with_removals(decision, everything, now) if everything else record
    staying = sum(1 for task in record.tasks if not (is_being_removed(task) or task.extra))
    if staying == record.spec.tasks and is_plain(record):
        return _with_newest(with_wanted_versions(record, UnifiedSpec(staying, {})))
    spec = unified(record, inputs)
    record = decision.record = _with_newest(with_wanted_versions(record, spec))
    if spec.removed:
        return with_removals(decision, spec.removed, now)
    known = {task.index for task in record.tasks}
    new = [index for index in spec.tasks if index not in known]
    return replace(record, tasks=_with_new_tasks(record, new, spec, now)) if new else record


def with_removals(decision: Decision, surplus: frozenset[int], now: Moment) -> JobRecord:
    """Return the record with the removal of some tasks begun, or offered to the controller.

    A controller is asked about tasks that serve, and about tasks for which it acknowledged another
    operation: an acknowledged update does not allow a removal.
    """
    record, ledger = decision.record, decision.ledger
    generation, tasks = record.generation, list[TaskRecord]()
    asks = is_controlled(record)
    for task in record.tasks:
        if task.index in surplus:
            is_down = task.phase in ENDING
            is_acknowledged_update = (
                asks and has_acknowledged_operation(task) and task.phase is not TaskPhase.LOST
            )
            if is_acknowledged_update and (is_down or (task.placement is None and not task.reason)):
                tasks.append(task)  # its removal is offered once it serves again
                continue
            if task.placement is None:
                continue
            if asks and (task.listed or is_acknowledged_update):
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
    resource that they wait for (BUG-AL1). While only canaries may run that version, or its update
    is halted, none of them gets it. A lost task keeps the version that it was started with until it
    is placed elsewhere (`placement_version`): its old copy may run (BUG-CP30).
    """
    plain = is_plain(record)
    if plain and (
        all(task.version == record.version for task in record.tasks) or is_held_back(record)
    ):
        return record

    generation, held_back = record.generation, is_held_back(record)

    def renewed(task: TaskRecord) -> TaskRecord:
        nonlocal generation
        if task.phase is not TaskPhase.PENDING or is_being_removed(task):
            return task
        version = record.version if plain else target_of(record, task)
        if task.version == version or (held_back and version == record.version):
            return task
        if reason_to_wait(record, task, record.specs.get(version, record.spec)):
            return task
        generation += 1
        changed = {"version": version, "generation": generation}
        return replace(task, reason="", attempts=0, **changed)

    tasks = [renewed(task) for task in record.tasks]
    return replace(record, tasks=tasks, generation=generation)


def keeps_serving(task: TaskRecord, view: View) -> bool:
    """Return whether a task serves, and its machine does not force it out now."""
    return available(task, view) and not is_overdue(task, view)


def begin_removals(decision: Decision, inputs: DecisionInput, removable: int) -> JobRecord:
    """Return the record with acknowledged and overdue removals begun.

    At most `removable` serving extra tasks are removed: the rest replace tasks that do not serve.
    """
    record, ledger, generation = decision.record, decision.ledger, decision.record.generation
    asks, tasks = is_controlled(record), list[TaskRecord]()
    for task in record.tasks:
        if is_being_removed(task) and waits(task):
            forced = is_overdue(task, inputs.view)
            stands_in = task.extra and keeps_serving(task, inputs.view)
            if forced or (is_acknowledged(task) and (removable > 0 or not stands_in)):
                removable -= stands_in
                generation += 1
                approved = approval(task, asks=asks, forced=forced)
                task = ledger.with_state(task, OperationState.RUNNING, approved=approved)
                task = take_down(task, generation, inputs.now)
        tasks.append(task)
    if generation == record.generation:
        return record
    return replace(record, tasks=tasks, generation=generation)


def with_withdrawn_removals(decision: Decision) -> JobRecord:
    """Return the record without waiting removals of tasks that are wanted again."""
    record = decision.record
    waiting = [t for t in record.tasks if is_being_removed(t) and waits(t) and not t.extra]
    staying = sum(1 for task in record.tasks if not (is_being_removed(task) or task.extra))
    wanted_again = {task.index for task in waiting[: max(0, wanted_tasks(record) - staying)]}
    if not wanted_again:
        return record
    reason = "the task is wanted again"
    tasks = [
        decision.ledger.close(task, OperationState.WITHDRAWN, reason)
        if task.index in wanted_again
        else task
        for task in record.tasks
    ]
    return replace(record, tasks=tasks)


def _with_new_tasks(
    record: JobRecord, new: Sequence[int], spec: UnifiedSpec, now: Moment
) -> list[TaskRecord]:
    plain, tasks = is_plain(record), list(record.tasks)
    for index in new:
        version = spec.tasks[index].version
        tasks.append(
            TaskRecord(
                index=index,
                version=version_of_new_tasks(record) if version == record.version else version,
                generation=record.generation,
                since=now.wall,
                begun=now.steady,
                wants=0 if plain else version,
            )
        )
    tasks.sort(key=lambda task: task.index)
    return tasks
