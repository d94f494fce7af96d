"""The operation that a task needs, why, and how urgent it is."""

from __future__ import annotations

from math import inf

from control_plane.agents.core.seen import SeenMachine
from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.machines import EventKind
from control_plane.api.operations import MUST_LEAVE, Cause, Operation, OperationKind
from control_plane.job_control.core.intents import target_of
from control_plane.scheduler.core.decision import Seen
from control_plane.scheduler.core.operations import last_run, waits
from control_plane.scheduler.core.owner_moves import is_moved, is_restarted
from control_plane.scheduler.core.rollout import host_of
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


def need(
    record: JobRecord, task: TaskRecord, seen: Seen
) -> tuple[OperationKind, Cause, str, float | None]:
    """Return kind, cause, reason and deadline of the operation that a task needs now."""
    machine = host_of(task, seen.view)
    if is_moved(task) and task.operation is not None:
        return OperationKind.MOVE, task.operation.cause, task.operation.reason, None
    if machine is not None and (event := machine.departure) is not None:
        cause = _LEAVE_BECAUSE.get(event.kind, Cause.MAINTENANCE)
        return OperationKind.MOVE, cause, event.reason, event.deadline
    if (target := target_of(record, task)) != task.version:
        reason = f"version {target} instead of {last_run(task)}"
        return OperationKind.UPDATE, cause_of_update(record, task), reason, None
    if is_restarted(task) and task.operation is not None:
        return OperationKind.RESTART, Cause.OWNER, task.operation.reason, None
    return (
        OperationKind.MOVE,
        Cause.REBALANCE,
        "the tasks of the job are then spread more evenly",
        None,
    )


def due_first(task: TaskRecord, seen: Seen) -> tuple[float, bool, bool, int]:
    """Return a task's sort key in the queue for the budget: the nearest deadline goes first.

    Among tasks without a deadline, waiting ones come first, but for those without room.
    """
    machine = host_of(task, seen.view)
    event = machine.departure if machine is not None else None
    deadline = event.deadline if event is not None else None
    is_stuck = task.index in seen.without_room
    return inf if deadline is None else deadline, is_stuck, not waits(task), task.index


def can_wait(task: TaskRecord, machine: SeenMachine, seen: Seen) -> bool:
    """Return whether a serving task is left alone because much capacity near it is lost."""
    if not seen.held_back or machine.overdue or task.placement is None:
        return False
    if task.placement.machine not in seen.held_back:
        return False
    event = machine.departure
    return event is None or event.kind not in (EventKind.REVOKED, EventKind.POWER_CAP)


def is_voluntary(operation: Operation) -> bool:
    """Return whether an operation takes down a task that could continue to run."""
    return operation.cause in _VOLUNTARY and operation.kind is not OperationKind.START


def is_failed_trial(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task runs the version of an ended canary, and goes back."""
    return task.version in record.trials and is_outdated(task, record)
