"""Moves by the ReBalancer: operations like any other, to a machine that it names.

Such a move has cause `rebalance` and names its machine from the start. A repair of a job's spread
has the same cause, but gets its machine only when it begins.
"""

from __future__ import annotations

from msgspec.structs import replace

from control_plane.api.jobs import JobRecord, task_at
from control_plane.api.operations import Cause, OperationKind
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import waits, with_proposed
from control_plane.scheduler.core.rollout import is_quiet


def with_rebalance(record: JobRecord, index: int, to: str, reason: str, now: Moment) -> JobRecord:
    """Return the record in which a task is to move; the same record if its job is not quiet.

    A quiet job has no other operation, and all of its tasks serve.
    """
    task = task_at(record, index)
    if task is None or task.operation is not None or record.stopping or record.paused:
        return record
    if not is_quiet(record) or task.placement is None or task.placement.machine == to:
        return record
    return with_proposed(record, task, now, OperationKind.MOVE, Cause.REBALANCE, reason, to)


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
