"""The questions to a job's controller, and how long its answers hold.

An acknowledgement refers to the state that was reported to the controller. It counts only while no
other task is down, and while its own task has not recovered. Otherwise an acknowledged operation
that has not begun lapses and is offered again. So no operation begins during a failure that the
controller did not consider.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.machines import UnavailabilityEvent
from control_plane.api.operations import DEADLINE, MUST_LEAVE, STOP, Cause, OperationState
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import OperationLedger, is_offered, machine_of
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.rollout import is_overdue
from control_plane.task_control.core.conversation import ControllerAnswer, Question
from taskcontrol.api import AdvanceNotice, TaskOperation, UnhealthyTask

OFFERED_MAX = 2000
"""Operations of one call: some 500 KiB."""
_UNDER_WAY = (OperationState.ACKNOWLEDGED, OperationState.RUNNING)


def is_controlled(record: JobRecord) -> bool:
    """Return whether a controller is asked; none is asked before a whole job is stopped."""
    return record.spec.controller is not None and not record.stopping


def question(record: JobRecord, view: View) -> Question:
    """Return the offered operations, and the state to report with them."""
    unhealthy, offered = list[UnhealthyTask](), list[TaskOperation]()
    for task in record.tasks:
        if is_down(task, view):
            unhealthy.append(_unhealthy(task, view))
        if is_offered(task) and len(offered) < OFFERED_MAX:
            offered.append(_offered(task, view))
    notices = _notices(record, view)
    tasks, indexes = len(record.tasks), _index_ranges(record)
    return Question(tuple(offered), notices, tuple(unhealthy), tasks, indexes)


def is_down(task: TaskRecord, view: View) -> bool:
    """Return whether a task does not serve, or may stop at any moment by an acknowledgement."""
    return not available(task, view) or has_acknowledged_operation(task)


def with_answer(
    record: JobRecord, view: View, answer: ControllerAnswer, ledger: OperationLedger, now: Moment
) -> JobRecord:
    """Return the record with operations acknowledged or lapsed, by the controller's answer."""
    if not is_controlled(record):
        if not record.asked:  # no controller was ever asked
            return record
        return _changed(record, lambda task: _acknowledged_without_controller(task, ledger))
    holds = _is_answer_current(record, view, answer)
    return _changed(
        record,
        lambda task: _with_answer_of_task(
            task, answer, ledger, now, holds=holds, serves=available(task, view)
        ),
    )


def is_known(record: JobRecord, view: View) -> bool:
    """Return whether the state of all tasks' machines is known; it is not right after a start."""
    machines = (view.get(machine_of(task)) for task in record.tasks)
    return all(machine is None or machine.known for machine in machines)


def _acknowledged_without_controller(task: TaskRecord, ledger: OperationLedger) -> TaskRecord:
    """Acknowledge an offered operation because the job has no controller any more."""
    return ledger.with_state(task, OperationState.ACKNOWLEDGED) if is_offered(task) else task


def _with_answer_of_task(
    task: TaskRecord,
    answer: ControllerAnswer,
    ledger: OperationLedger,
    now: Moment,
    *,
    holds: bool,
    serves: bool,
) -> TaskRecord:
    operation = task.operation
    if operation is None:
        return task
    is_failure = operation.cause is Cause.FAILURE
    if operation.state is OperationState.OFFERED:
        was_down = task.index in answer.broken
        if holds and operation.id in answer.acks and not (was_down and serves):
            changes = {"approved": answer.by, "instead": answer.acks[operation.id]}
            return ledger.with_state(
                task, OperationState.ACKNOWLEDGED, was_down=was_down, **changes
            )
        if is_failure and operation.deadline is not None and operation.deadline <= now.wall:
            return ledger.with_state(task, OperationState.ACKNOWLEDGED, approved=DEADLINE)
        return task
    lapses = not holds or (operation.was_down and serves)
    if operation.state is OperationState.ACKNOWLEDGED and lapses and not is_failure:
        return ledger.with_state(task, OperationState.OFFERED, approved="", instead="")
    return task


def _is_answer_current(record: JobRecord, view: View, answer: ControllerAnswer) -> bool:
    """Return whether only tasks are down that were reported to the controller or acknowledged."""
    return all(
        available(task, view) or task.index in answer.down or has_acknowledged_operation(task)
        for task in record.tasks
    ) and not any(_is_forced(task, view) and task.index not in answer.down for task in record.tasks)


def has_acknowledged_operation(task: TaskRecord) -> bool:
    """Return whether an operation that the controller acknowledged has not ended."""
    operation = task.operation
    return (
        operation is not None
        and operation.state in _UNDER_WAY
        and operation.approved not in ("", DEADLINE)
    )


def _is_forced(task: TaskRecord, view: View) -> bool:
    """Return whether a task has to leave now without an acknowledgement."""
    return is_overdue(task, view) and not has_acknowledged_operation(task)


def _changed(record: JobRecord, change: Callable[[TaskRecord], TaskRecord]) -> JobRecord:
    tasks = [change(task) for task in record.tasks]
    if all(one is other for one, other in zip(tasks, record.tasks, strict=True)):
        return record
    return replace(record, tasks=tasks)


# -- the request


def _unhealthy(task: TaskRecord, view: View) -> UnhealthyTask:
    return UnhealthyTask(
        task=task.index,
        reason=_why(task, view),
        machine=machine_of(task),
        operation=task.operation.id
        if has_acknowledged_operation(task) and task.operation is not None
        else "",
    )


def _why(task: TaskRecord, view: View) -> str:
    if available(task, view):
        return "an operation was acknowledged, and may begin at any moment"
    if task.reason:
        return task.reason
    if task.phase is TaskPhase.RUNNING and task.listed:
        return "its machine does not answer"
    return str(task.phase)


def _offered(task: TaskRecord, view: View) -> TaskOperation:
    operation, machine = task.operation, view.get(machine_of(task))
    assert operation is not None
    event = _departure_plan(machine) if operation.cause in MUST_LEAVE else None
    return TaskOperation(
        id=operation.id,
        task=task.index,
        kind=operation.kind.value,
        cause=operation.cause.value,
        reason=operation.reason,
        machine=machine_of(task),
        notice=event.event_id if event is not None else "",
        deadline=event.deadline if event is not None else operation.deadline,
        instead=[STOP] if event is not None and machine is not None and machine.returning else [],
    )


def _departure_plan(machine: ObservedMachine | None) -> UnavailabilityEvent | None:
    """Return the plan that makes tasks leave a machine: the one with the nearest deadline."""
    plans = machine.plans if machine is not None and machine.leaving else ()
    return min(plans, key=lambda e: (e.deadline is None, e.deadline or 0.0, e.start), default=None)


def _notices(record: JobRecord, view: View) -> tuple[AdvanceNotice, ...]:
    tasks_on: dict[str, list[int]] = {}
    for task in record.tasks:
        if task.placement is not None:
            tasks_on.setdefault(task.placement.machine, []).append(task.index)
    return tuple(
        AdvanceNotice(
            id=event.event_id,
            kind=event.kind.value,
            machine=name,
            tasks=tasks,
            start=event.start,
            deadline=event.deadline,
            expected_duration_s=event.expected_duration_s,
            tasks_survive=event.tasks_survive,
            reason=event.reason,
        )
        for name, tasks in sorted(tasks_on.items())
        if (machine := view.get(name)) is not None
        for event in machine.plans
    )


def _index_ranges(record: JobRecord) -> tuple[tuple[int, int], ...]:
    """Return the first and the last of each run of the job's indexes."""
    runs = list[tuple[int, int]]()
    for index in sorted(task.index for task in record.tasks):
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return tuple(runs)
