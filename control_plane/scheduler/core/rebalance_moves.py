"""Moves by the ReBalancer: operations like any other, to a machine that it names.

Such a move has cause `rebalance` and names its machine from the start. A repair of a job's spread
has the same cause, but gets its machine only when it begins.
"""

from __future__ import annotations

from msgspec.structs import replace

from control_plane.api.jobs import JobRecord
from control_plane.api.operations import Cause, OperationKind, OperationState
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import Ledger, waits
from control_plane.scheduler.core.rollout import is_quiet


def with_rebalance(record: JobRecord, index: int, to: str, reason: str, now: Moment) -> JobRecord:
    """Return the record in which a task is to move; the same record if its job is not quiet.

    A quiet job has no other operation, and all of its tasks serve.
    """
    task = next((task for task in record.tasks if task.index == index), None)
    if task is None or task.operation is not None or record.stopping or record.paused:
        return record
    if not is_quiet(record) or task.placement is None or task.placement.machine == to:
        return record
    ledger = Ledger(record, now)
    moved = ledger.open(task, OperationKind.MOVE, Cause.REBALANCE, reason, OperationState.PROPOSED)
    assert moved.operation is not None
    moved = replace(moved, operation=replace(moved.operation, to_machine=to))
    tasks = [moved if task.index == index else task for task in record.tasks]
    return replace(record, tasks=tasks, operations=ledger.opened)


def rebalanced(record: JobRecord) -> set[int]:
    """Return the tasks with a rebalancing move: they serve until their target machine is ready."""
    return {
        task.index
        for task in record.tasks
        if task.operation is not None and task.operation.cause is Cause.REBALANCE
    }


def without_rebalance(record: JobRecord, index: int) -> JobRecord:
    """Return the record with the target machine removed from a move that has not begun.

    The scheduler then withdraws it, like any operation that is not needed.
    """
    tasks = [
        replace(task, operation=replace(task.operation, to_machine=""))
        if task.index == index
        and task.operation is not None
        and task.operation.cause is Cause.REBALANCE
        and task.operation.to_machine
        and waits(task)
        else task
        for task in record.tasks
    ]
    return replace(record, tasks=tasks) if tasks != record.tasks else record
