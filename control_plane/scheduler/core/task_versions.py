"""The version that a task runs next, while only some of a job's tasks may run the newest one."""

from __future__ import annotations

from math import ceil

from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import Cause, OperationKind
from control_plane.job_control.core.intents import is_plain, push_of, target_of
from control_plane.scheduler.core.copies import reason_to_wait
from control_plane.scheduler.core.new_tasks import has_no_room, is_new, is_newest_rollout
from control_plane.scheduler.core.operations import is_offered


def is_outdated(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task is to be taken down for another version.

    A lost task is not: it gets its wanted version where it is placed. A paused or halted push takes
    no task down for the newest version; tasks may still go back to their earlier version.
    """
    if task.version == (task.wants or record.version) or task.phase is TaskPhase.LOST:
        return False
    target = target_of(record, task)
    if target == task.version:
        return False
    if target == record.version:
        halted = record.rollout is not None and record.rollout.halted and is_held_back(record)
        if halted or record.paused:
            return False
    return not reason_to_wait(record, task, record.specs.get(target, record.spec))


def updates_to_newest(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether an update of a task brings it to the newest version."""
    return target_of(record, task) == record.version


def is_held_back(record: JobRecord) -> bool:
    """Return whether only some tasks may run the newest version yet."""
    rollout = record.rollout
    return (
        rollout is not None
        and is_newest_rollout(rollout, record)
        and (rollout.halted or not rollout.passed)
    )


def newest_allowed(record: JobRecord) -> int | None:
    """Return how many more tasks may become the newest version now; None: all of them."""
    rollout = record.rollout
    if rollout is None or not is_held_back(record):
        return None
    if rollout.halted:
        return 0
    new = sum(1 for task in record.tasks if is_new(task, record) and not has_no_room(task))
    return max(0, canary_count(record) - new)


def is_passed_over(record: JobRecord, task: TaskRecord) -> bool:
    """Return whether an extra task gets no place now: other tasks became canaries meanwhile."""
    return has_no_room(task) and is_new(task, record) and newest_allowed(record) == 0


def canary_count(record: JobRecord) -> int:
    """Return how many tasks are to be canaries of the push, at most its share."""
    canary, tasks = record.spec.update.canary, record.spec.tasks
    if canary is None:
        return 0
    part = ceil(tasks * canary.share) if canary.share is not None else 0
    most = tasks if is_plain(record) else push_of(record).of(tasks)
    return min(most, max(canary.tasks, part))


def is_in_entitlement(record: JobRecord, version: int) -> bool:
    """Return whether tasks of a version may still be placed: it is in the job's entitlement."""
    known = record.specs.get(version)
    return known is not None and known.entitlement == record.spec.entitlement


def version_after_stop(record: JobRecord, task: TaskRecord) -> int:
    """Return the version with which a task starts after it was taken down."""
    operation, target = task.operation, target_of(record, task)
    if operation is not None and operation.kind is OperationKind.UPDATE:
        return target
    if not is_in_entitlement(record, task.version):
        return record.version
    return task.version if _keeps_version(record, task, target) else target


def placement_version(record: JobRecord, task: TaskRecord) -> int:
    """Return the version with which a task that needs a machine is placed.

    A lost task gets the newest version only when it is placed. Until then its old copy may be found
    again, and the specification of that copy decides when it has certainly ended. The task keeps
    its version in three cases: only some tasks may run the newest one, its controller has not
    answered, or the newest version must not run together with the old copy. No task is placed in an
    entitlement that its job leaves.
    """
    if not is_in_entitlement(record, task.version):
        return record.version
    if task.phase is not TaskPhase.LOST or is_offered(task):
        return task.version
    target = target_of(record, task)
    return task.version if _keeps_version(record, task, target) else target


def _keeps_version(record: JobRecord, task: TaskRecord, target: int) -> bool:
    """Return whether a task that starts again keeps its version."""
    held_back = target == record.version and is_held_back(record)
    return held_back or reason_to_wait(record, task, record.specs.get(target, record.spec)) != ""


def version_of_new_tasks(record: JobRecord) -> int:
    """Return the version of tasks that are added now."""
    rollout = record.rollout
    if rollout is not None and is_held_back(record) and is_in_entitlement(record, rollout.base):
        return rollout.base
    return record.version


def cause_of_update(record: JobRecord, task: TaskRecord) -> Cause:
    """Return why a task gets another version now."""
    rollout, target = record.rollout, target_of(record, task)
    if target != record.version:
        return Cause.CANARY if target in record.trials else Cause.ROLLBACK
    if rollout is None or not is_newest_rollout(rollout, record):
        return Cause.RELEASE
    if rollout.returns_from:
        return Cause.ROLLBACK
    if rollout.base in record.specs and not is_in_entitlement(record, rollout.base):
        return Cause.TRANSFER
    return Cause.RELEASE if rollout.passed else Cause.CANARY
