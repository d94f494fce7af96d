"""Finds the tasks that need an operation: which one, why, and how urgent it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from control_plane.agents.core.observed import ObservedMachine
from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.machines import EventKind
from control_plane.api.operations import MUST_LEAVE, Cause, Operation, OperationKind
from control_plane.job_control.core.intents import target_of
from control_plane.scheduler.core.decision import Decision, DecisionInput
from control_plane.scheduler.core.new_tasks import PLACED
from control_plane.scheduler.core.operations import last_started_version, waits
from control_plane.scheduler.core.owner_moves import is_moved, is_restarted
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import host_of, is_quiet
from control_plane.scheduler.core.task_versions import cause_of_update, is_outdated

_VOLUNTARY = (
    *(Cause.RELEASE, Cause.CANARY, Cause.ROLLBACK, Cause.TRANSFER, Cause.REBALANCE, Cause.OWNER),
    *MUST_LEAVE,
)
_LEAVE_BECAUSE = {
    EventKind.REVOKED: Cause.LOAN,
    EventKind.PROFILE: Cause.PROFILE,
    EventKind.POWER_CAP: Cause.POWER,
}
"""Kind of event that takes a machine away → cause of moves from there; others: maintenance."""


class NeededOperation(NamedTuple):
    """The operation that a task needs, and why."""

    kind: OperationKind
    cause: Cause
    reason: str
    deadline: float | None = None
    """When the task has to leave its machine at the latest, in seconds since 1970; None: never."""


def needed_operation(record: JobRecord, task: TaskRecord, inputs: DecisionInput) -> NeededOperation:
    """Return the operation that a task needs now."""
    machine = host_of(task, inputs.view)
    if is_moved(task) and task.operation is not None:
        return NeededOperation(OperationKind.MOVE, task.operation.cause, task.operation.reason)
    if machine is not None and (event := machine.departure) is not None:
        cause = _LEAVE_BECAUSE.get(event.kind, Cause.MAINTENANCE)
        return NeededOperation(OperationKind.MOVE, cause, event.reason, event.deadline)
    if (target := target_of(record, task)) != task.version:
        reason = f"version {target} instead of {last_started_version(task)}"
        return NeededOperation(OperationKind.UPDATE, cause_of_update(record, task), reason)
    if is_restarted(task) and task.operation is not None:
        return NeededOperation(OperationKind.RESTART, Cause.OWNER, task.operation.reason)
    reason = "the tasks of the job are then spread more evenly"
    return NeededOperation(OperationKind.MOVE, Cause.REBALANCE, reason)


@dataclass(slots=True)
class DueTasks:
    """The tasks that serve, and those that need an operation, by index."""

    serving: set[int] = field(default_factory=set)
    due: dict[int, TaskRecord] = field(default_factory=dict)
    """Tasks that need an operation."""
    overdue: set[int] = field(default_factory=set)
    """Those of `due` that must leave their machine now."""
    repairs: Sequence[int] = ()
    """Those of `due` whose move only makes the spread more even."""


def find_due(decision: Decision, staying: Sequence[TaskRecord], inputs: DecisionInput) -> DueTasks:
    """Return which tasks serve and which need an operation; note those that must wait."""
    record, view, found = decision.record, inputs.view, DueTasks()
    serving, due = found.serving, found.due
    for task in staying:
        if available(task, view):
            serving.add(task.index)
        machine = host_of(task, view)
        if machine is None or not (machine.up and machine.answering and task.phase in PLACED):
            continue
        outdated = is_outdated(task, record) and not task.extra
        if machine.leaving or outdated or is_moved(task) or is_restarted(task):
            if task.index in serving and can_wait(task, machine, inputs):
                decision.held.append(task.index)
                continue
            due[task.index] = task
            if machine.overdue:
                found.overdue.add(task.index)
    quiet = not due and len(serving) == len(staying) and is_quiet(record)
    if quiet and not (inputs.held_back or decision.held):
        found.repairs = inputs.repairs
        due |= {task.index: task for task in staying if task.index in found.repairs}
    return found


def urgency(task: TaskRecord, inputs: DecisionInput) -> tuple[float, bool, bool, int]:
    """Return a task's sort key in the queue for the budget: the nearest deadline comes first.

    With equal deadlines, or none, tasks for which no machine had room come last, and tasks with a
    waiting operation come first.
    """
    machine = host_of(task, inputs.view)
    event = machine.departure if machine is not None else None
    deadline = event.deadline if event is not None else None
    is_stuck = task.index in inputs.without_room
    return inf if deadline is None else deadline, is_stuck, not waits(task), task.index


def can_wait(task: TaskRecord, machine: ObservedMachine, inputs: DecisionInput) -> bool:
    """Return whether a serving task stays for now because much capacity near it is lost."""
    if not inputs.held_back or machine.overdue or task.placement is None:
        return False
    if task.placement.machine not in inputs.held_back:
        return False
    event = machine.departure
    return event is None or event.kind not in (EventKind.REVOKED, EventKind.POWER_CAP)


def is_voluntary(operation: Operation) -> bool:
    """Return whether an operation takes down a task that could continue to run."""
    return operation.cause in _VOLUNTARY and operation.kind is not OperationKind.START


def is_failed_trial(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task runs the version of an ended canary, and goes back."""
    return task.version in record.trials and is_outdated(task, record)
