"""Moves of single tasks that their owner asks for: operations like any other."""

from __future__ import annotations

from msgspec.structs import replace

from agent.errors import Conflict, NotFound
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import Cause, OperationKind, OperationState
from control_plane.scheduler.core.moment import Moment
from control_plane.scheduler.core.operations import Ledger, is_going, waits


def with_move(record: JobRecord, index: int, to: str, reason: str, now: Moment) -> JobRecord:
    """Return the record in which a task is to move, to a machine or wherever is best.

    The same again changes nothing; what the task waits for already is not taken back.
    """
    task = next((task for task in record.tasks if task.index == index), None)
    if task is None or is_going(task):
        raise NotFound(f"job {record.name!r} has no task {index}")
    if is_moved(task) and task.operation is not None and task.operation.to_machine == to:
        return record
    if task.placement is None or task.phase is not TaskPhase.RUNNING:
        raise Conflict(
            f"task {record.name}-{index} is {task.phase} and cannot move",
            hint=f"twinectl task story {record.name}-{index}",
        )
    if task.operation is not None:
        doing = f"{task.operation.kind} because of {task.operation.cause}"
        raise Conflict(f"task {record.name}-{index} cannot move: {doing} comes first")
    if to == task.placement.machine:
        raise Conflict(f"task {record.name}-{index} is on {to} already")
    ledger = Ledger(record, now)
    moved = ledger.open(task, OperationKind.MOVE, Cause.OWNER, reason, OperationState.PROPOSED)
    assert moved.operation is not None
    moved = replace(moved, operation=replace(moved.operation, to_machine=to))
    tasks = [moved if task.index == index else task for task in record.tasks]
    return replace(record, tasks=tasks, operations=ledger.opened)


def is_moved(task: TaskRecord) -> bool:
    """Return whether the task's owner wants it elsewhere, and that has not begun."""
    return task.operation is not None and task.operation.cause is Cause.OWNER and waits(task)


def goes_to(task: TaskRecord) -> str:
    """Return the machine that the owner wants for a task; empty: any."""
    known = task.operation
    return known.to_machine if known is not None and known.cause is Cause.OWNER else ""


def without_place(task: TaskRecord) -> TaskRecord:
    """Return a task that was taken down for a machine that has no room now: any other does."""
    known = task.operation
    if known is None or not goes_to(task):
        return task
    return replace(task, operation=replace(known, to_machine=""))
