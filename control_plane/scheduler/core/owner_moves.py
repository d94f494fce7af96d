"""Moves and restarts of single tasks by their owner: operations like any other."""

from __future__ import annotations

from msgspec.structs import replace

from control_plane.api.jobs import JobRecord, Placement, TaskPhase, TaskRecord, task_at
from control_plane.api.operations import Cause, OperationKind
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import is_being_removed, waits, with_proposed
from wire.errors import Conflict, NotFound


def with_move(record: JobRecord, index: int, to: str, reason: str, now: Moment) -> JobRecord:
    """Return the record in which a task is to move, to the machine `to` or (empty) to the best one.

    A repeated call changes nothing; a present operation of the task is not replaced.
    """
    task = _existing_task(record, index)
    if is_moved(task) and task.operation is not None and task.operation.to_machine == to:
        return record
    if to == _placement_of_idle(record, task, "move", (TaskPhase.RUNNING,)).machine:
        raise Conflict(f"task {record.name}-{index} is already on {to}")
    return with_proposed(record, task, now, OperationKind.MOVE, Cause.OWNER, reason, to)


def with_restart(record: JobRecord, index: int, reason: str, now: Moment) -> JobRecord:
    """Return the record in which a task is to restart on its machine.

    A repeated call changes nothing; a present operation of the task is not replaced.
    """
    task = _existing_task(record, index)
    if is_restarted(task):
        return record
    _placement_of_idle(record, task, "restart", (TaskPhase.STARTING, TaskPhase.RUNNING))
    return with_proposed(record, task, now, OperationKind.RESTART, Cause.OWNER, reason)


def is_moved(task: TaskRecord) -> bool:
    """Return whether a task has a move by its owner or the ReBalancer that has not begun."""
    return _has_waiting(task, OperationKind.MOVE) or (_is_rebalanced(task) and waits(task))


def is_restarted(task: TaskRecord) -> bool:
    """Return whether a task has a restart by its owner that has not begun."""
    return _has_waiting(task, OperationKind.RESTART)


def _has_waiting(task: TaskRecord, kind: OperationKind) -> bool:
    known = task.operation
    return known is not None and known.cause is Cause.OWNER and known.kind is kind and waits(task)


def _is_rebalanced(task: TaskRecord) -> bool:
    """Return whether the ReBalancer named a machine; a repair of the spread has none yet."""
    known = task.operation
    return known is not None and known.cause is Cause.REBALANCE and known.to_machine != ""


def _existing_task(record: JobRecord, index: int) -> TaskRecord:
    task = task_at(record, index)
    if task is None or is_being_removed(task):
        raise NotFound(f"job {record.name!r} has no task {index}")
    return task


def _placement_of_idle(
    record: JobRecord, task: TaskRecord, verb: str, phases: tuple[TaskPhase, ...]
) -> Placement:
    """Return the placement of a task without an operation; `Conflict` for others."""
    if task.placement is None or task.phase not in phases:
        raise Conflict(
            f"task {record.name}-{task.index} is {task.phase} and cannot {verb}",
            hint=f"twinectl task events {record.name}-{task.index}",
        )
    if task.operation is not None:
        doing = f"{task.operation.kind} because of {task.operation.cause}"
        raise Conflict(f"task {record.name}-{task.index} cannot {verb}: {doing} comes first")
    return task.placement


def wanted_machine(task: TaskRecord) -> str:
    """Return the machine that a task is wanted on; empty: any."""
    known = task.operation
    if known is None:
        return ""
    if known.cause is Cause.OWNER or (_is_rebalanced(task) and task.avoid != known.to_machine):
        return known.to_machine
    return ""


def without_wanted_machine(task: TaskRecord) -> TaskRecord:
    """Return a task whose target machine has no room now, free to go to any machine."""
    known = task.operation
    if known is None or not wanted_machine(task):
        return task
    return replace(task, operation=replace(known, to_machine=""))
