"""Adds extra tasks while wanted ones are updated or must leave their machine (SC21).

Extra tasks start first, if there is room, and serve before another task stops. While they serve
they count for the budget. There are at most `update.surge` of them, including those that are being
removed. A serving one is removed only within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from agent.api.volumes import VolumeKind
from control_plane.agents.core.observed import View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationKind, OperationState
from control_plane.job_control.core.intents import is_plain, stable_of
from control_plane.scheduler.core.approval import is_controlled
from control_plane.scheduler.core.decision import Decision, DecisionInput
from control_plane.scheduler.core.operations import is_being_removed, waits
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import is_overdue, must_move
from control_plane.scheduler.core.sizing import keeps_serving, with_removals
from control_plane.scheduler.core.task_versions import (
    is_outdated,
    newest_allowed,
    updates_to_newest,
    version_of_new_tasks,
)


def removable_serving(record: JobRecord, view: View) -> int:
    """Return how many serving tasks may be removed; below 0: too many tasks do not serve.

    A serving extra task replaces one other task until its removal begins. Tasks that a deadline
    forces out in this round do not count as serving (BUG-CP32).
    """
    base = _wanted_and_extra(record)[0]
    extras = [
        task for task in record.tasks if task.extra and (waits(task) or not is_being_removed(task))
    ]
    down = sum(1 for task in base if not keeps_serving(task, view))
    standing_in = sum(1 for task in extras if keeps_serving(task, view))
    return record.spec.update.max_unavailable + standing_in - down


def with_extra_tasks(decision: Decision, inputs: DecisionInput) -> JobRecord:
    """Return the record with as many extra tasks as it needs now, within its limits."""
    view = inputs.view
    record = decision.record = with_swapped_roles(decision.record, view)
    base, extras = _wanted_and_extra(record)
    most = 0 if record.stopping else record.spec.update.surge
    if not (most or extras):
        return record
    leaving = [task for task in base if _must_go(record, task, view)]
    waiting = len(leaving)
    going = sum(1 for task in base if _is_under_way(task))
    stale = [task for task in extras if is_outdated(task, record) or must_move(task, view)]
    kept = [task for task in extras if task not in stale]
    gone = stale + kept[min(most, waiting + going) :]
    if gone:
        return with_removals(decision, _removable(record, gone, view), inputs.now)
    known = sum(1 for task in record.tasks if task.extra)
    more = min(most, waiting) - len(kept)
    more, renew = min(more, most - known), newest_allowed(record)
    if inputs.surge_left is not None:
        decision.waits_for_surge = more > 0 and more > inputs.surge_left - known
        more = min(more, inputs.surge_left - known)
    version = _version_of_extras(record, leaving, renew)
    if version is None:
        version, more = record.version, more if renew is None else min(more, renew)
    if more <= 0:
        return record
    first = max([record.spec.tasks - 1, *(task.index for task in record.tasks)]) + 1
    added = [
        TaskRecord(
            index=first + n,
            version=version,
            generation=record.generation,
            since=inputs.now.wall,
            begun=inputs.now.steady,
            extra=True,
        )
        for n in range(more)
    ]
    return replace(record, tasks=[*record.tasks, *added])


def _version_of_extras(
    record: JobRecord, leaving: Sequence[TaskRecord], renew: int | None
) -> int | None:
    """Return the version of extra tasks for others that leave; None: the newest, as it may spread.

    `renew` is the number of tasks that may become the newest version now.
    """
    if not is_plain(record) and not any(updates_to_newest(task, record) for task in leaving):
        return stable_of(record) or record.version  # no task is updated to the newest
    if renew == 0 and not all(is_outdated(task, record) for task in leaving):
        return version_of_new_tasks(
            record
        )  # some must leave, and the newest version is not proven yet
    return None


def with_swapped_roles(
    record: JobRecord, view: View, without_room: frozenset[int] = frozenset()
) -> JobRecord:
    """Return the record in which extra tasks replace wanted tasks that have no room (BUG-CP52).

    Such an extra task may hold the room for which the other one waits. The two swap roles:
    the task without room becomes the extra one, and is removed like any other. `without_room`:
    running tasks that found no place to move to. Jobs with persistent volumes swap no roles.
    """
    extras = [task for task in record.tasks if task.extra and not is_being_removed(task)]
    free = [task for task in extras if available(task, view) and not must_move(task, view)]
    kinds = {volume.kind for spec in record.specs.values() for volume in spec.volumes.values()}
    if not free or VolumeKind.PERSISTENT in kinds:
        return record
    swapped: set[int] = set()
    for task in _wanted_and_extra(record)[0]:
        is_unplaced = task.phase is TaskPhase.PENDING and task.reason
        is_stuck = task.index in without_room and _must_go(record, task, view)
        if not (is_unplaced or is_stuck):
            continue
        fit = [
            extra
            for extra in free
            if not is_outdated(extra, record) or (is_unplaced and extra.version == task.version)
        ]
        if fit:
            free.remove(fit[0])
            swapped |= {task.index, fit[0].index}
    if not swapped:
        return record
    tasks = [replace(t, extra=not t.extra) if t.index in swapped else t for t in record.tasks]
    return replace(record, tasks=tasks)


def _wanted_and_extra(record: JobRecord) -> tuple[list[TaskRecord], list[TaskRecord]]:
    staying = [task for task in record.tasks if not is_being_removed(task)]
    extras = [task for task in staying if task.extra]
    return [task for task in staying if not task.extra], extras


def _must_go(record: JobRecord, task: TaskRecord, view: View) -> bool:
    """Return whether a task will be taken down for an update or a move."""
    return not _is_under_way(task) and (is_outdated(task, record) or must_move(task, view))


def _is_under_way(task: TaskRecord) -> bool:
    operation = task.operation
    return (
        operation is not None
        and operation.state is OperationState.RUNNING
        and operation.kind in (OperationKind.UPDATE, OperationKind.MOVE)
    )


def _removable(record: JobRecord, gone: list[TaskRecord], view: View) -> frozenset[int]:
    """Return which extra tasks may be removed now: idle ones, and serving ones by the budget.

    A task whose machine does not answer may serve: it stays until that is known. A controller
    is asked about all serving tasks; the budget applies when their removal begins.
    """
    if is_controlled(record):
        return frozenset(task.index for task in gone)
    serving = [task.index for task in gone if keeps_serving(task, view)]
    idle = [task.index for task in gone if not task.listed or is_overdue(task, view)]
    return frozenset([*idle, *serving[: max(0, removable_serving(record, view))]])
