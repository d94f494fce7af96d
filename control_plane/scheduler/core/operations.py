"""State changes of operations on tasks, and the events that log ended operations.

    proposed -> offered -> acknowledged -> running -> done | failed
       any of these, once it is not needed any more -> withdrawn

An involuntary operation (a failure, a resize) is running, or waits for a machine, from the start.
Operations follow the tasks: when the phase of a task changes, `follow` opens, advances and closes
its operation.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import TaskState, exit_text
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import (
    DEADLINE,
    REASON_MAX,
    WAITING,
    Cause,
    JobEvent,
    Operation,
    OperationKind,
    OperationState,
)
from control_plane.scheduler.core.clock import Moment

_BACK = "its machine is back"
ENDING = (TaskPhase.DRAINING, TaskPhase.STOPPING)
"""Phases of a task in its stop."""
_NOT_UP = (None, TaskState.ACCEPTED, TaskState.PREPARING, TaskState.STARTING)
"""States of a task whose program does not run yet."""


class OperationLedger:
    """The operations of one decision about one job."""

    def __init__(self, record: JobRecord, now: Moment) -> None:
        """Begin without events."""
        self.events: list[JobEvent] = []
        self.opened = record.operations
        self._job, self._now = record.name, now
        self._controller = None if record.stopping else record.spec.controller

    def open(
        self,
        task: TaskRecord,
        kind: OperationKind,
        cause: Cause,
        reason: str = "",
        state: OperationState = OperationState.RUNNING,
        deadline: float | None = None,
        ran: int = 0,
    ) -> TaskRecord:
        """Return the task with an operation; `ran`: see `last_started_version`, 0: its version."""
        self.opened += 1
        operation = Operation(
            id=f"{self._job}-{task.index}.{self.opened}",
            task=task.index,
            kind=kind,
            cause=cause,
            reason=reason[:REASON_MAX],
            state=state,
            deadline=deadline,
            from_machine=machine_of(task) if kind is not OperationKind.START else "",
            ran=0 if kind is OperationKind.START else ran or task.version,
            began=self._now.wall,
            since=self._now.wall,
        )
        return replace(task, operation=operation)

    def with_state(self, task: TaskRecord, state: OperationState, **changes: object) -> TaskRecord:
        """Return the task with its operation in a state, and with other fields of it changed."""
        known = task.operation
        if known is None or (known.state is state and not changes):
            return task
        return replace(task, operation=replace(known, state=state, since=self._now.wall, **changes))

    def close(self, task: TaskRecord, outcome: OperationState, reason: str = "") -> TaskRecord:
        """Return the task without its operation, which becomes an event of the log."""
        known = task.operation
        if known is None:
            return task
        self.events.append(
            JobEvent(
                task=task.index,
                operation=known.id,
                kind=known.kind,
                cause=known.cause,
                outcome=outcome,
                reason=(reason or known.reason)[:REASON_MAX],
                from_machine=known.from_machine,
                to_machine=machine_of(task) if outcome is OperationState.DONE else known.to_machine,
                version=task.version,
                start=known.began,
                end=self._now.wall,
                approved=known.approved,
            )
        )
        return replace(task, operation=None)

    def add_rollout_event(self, reason: str, outcome: OperationState) -> None:
        """Add an event about the rollout of the job's newest version."""
        self.events.append(
            JobEvent(
                task=None,
                operation="",
                kind=OperationKind.ROLLOUT,
                cause=Cause.RELEASE,
                outcome=outcome,
                reason=reason[:REASON_MAX],
                start=self._now.wall,
                end=self._now.wall,
            )
        )

    # -- changes of tasks

    def follow(self, before: JobRecord, after: JobRecord) -> JobRecord:
        """Return the record with operations that match the changes of its tasks."""
        if before.tasks is after.tasks:
            return after
        known = {task.index: task for task in before.tasks}
        tasks = []
        for task in after.tasks:
            old = known.pop(task.index, None)
            tasks.append(task if old is task else self._followed(old, task, after))
        for old in known.values():
            self._removed(old, after)
        return replace(after, tasks=tasks, operations=self.opened)

    def _followed(self, old: TaskRecord | None, task: TaskRecord, job: JobRecord) -> TaskRecord:
        if old is None:
            cause = Cause.RESIZE if job.version > 1 or job.operations else Cause.RELEASE
            cause = Cause.SURGE if task.extra else cause
            return self.open(task, OperationKind.START, cause, state=OperationState.PROPOSED)
        if task.operation is None and old.operation is not None:
            task = replace(task, operation=old.operation)  # a new record of the same task
        if is_crash_to_log(old, task):
            self._crashed(task)
        match task.phase:
            case TaskPhase.LOST if old.phase is not TaskPhase.LOST:
                return self._lost(task)
            case TaskPhase.PENDING if old.phase is not TaskPhase.PENDING:
                return self._unplaced(old, task)
            case TaskPhase.STARTING:
                return self._started(old, task)
            case TaskPhase.RUNNING if task.listed and task.operation is not None:
                if task.operation.state is OperationState.RUNNING:
                    return self.close(task, OperationState.DONE)
                if old.phase is TaskPhase.LOST:
                    return self.close(task, OperationState.WITHDRAWN, _BACK)
        return task

    def _crashed(self, task: TaskRecord) -> None:
        """Log that a task ended by itself; its agent restarts it if the restart policy allows."""
        how = exit_text(task.last_exit) if task.last_exit is not None else "ended"
        times = "once" if (count := _crash_count(task)) == 1 else f"{count} times"
        why = f": {task.reason}" if task.reason else ""
        self.events.append(
            JobEvent(
                task=task.index,
                operation="",
                kind=OperationKind.RESTART,
                cause=Cause.FAILURE,
                outcome=OperationState.FAILED,
                reason=f"{how}; it ended {times} so far{why}"[:REASON_MAX],
                from_machine=machine_of(task),
                version=task.version,
                start=task.last_exit.at if task.last_exit is not None else self._now.wall,
                end=self._now.wall,
            )
        )

    def _lost(self, task: TaskRecord) -> TaskRecord:
        known = task.operation
        if known is not None:
            waits = known.state in WAITING
            outcome = OperationState.WITHDRAWN if waits else OperationState.FAILED
            task = self.close(task, outcome, task.reason)
        state, deadline = OperationState.PROPOSED, None
        if self._controller is not None:  # the controller may prefer to wait for the machine
            state = OperationState.OFFERED
            deadline = self._now.wall + self._controller.failure_wait_s
        return self.open(task, OperationKind.MOVE, Cause.FAILURE, task.reason, state, deadline)

    def _unplaced(self, old: TaskRecord, task: TaskRecord) -> TaskRecord:
        """Return a task that lost its machine, by its operation or otherwise, with an operation."""
        known = task.operation
        if known is not None and known.kind is not OperationKind.REMOVE:
            return task
        if known is not None:  # it is wanted again
            task = self.close(task, OperationState.DONE)
            return self.open(task, OperationKind.START, Cause.RESIZE, state=OperationState.PROPOSED)
        opened = self.open(
            replace(task, placement=old.placement),
            OperationKind.MOVE,
            Cause.FAILURE if task.reason else Cause.GONE,
            task.reason or "its machine no longer belongs to the entitlement",
            OperationState.PROPOSED,
        )
        return replace(opened, placement=task.placement)

    def _started(self, old: TaskRecord, task: TaskRecord) -> TaskRecord:
        known = task.operation
        is_back = old.phase is TaskPhase.LOST and task.placement == old.placement
        if is_back and known is not None and known.kind is OperationKind.MOVE:
            task, known = self.close(task, OperationState.WITHDRAWN, _BACK), None
        if known is None:
            if task.generation == old.generation:
                return task
            elsewhere = task.placement != old.placement
            kind = OperationKind.MOVE if elsewhere else OperationKind.RESTART
            return self._running_towards(self.open(task, kind, Cause.FAILURE, task.reason))
        if known.state in WAITING and task.placement != old.placement:
            return self._running_towards(self.with_state(task, OperationState.RUNNING))
        return task

    def _running_towards(self, task: TaskRecord) -> TaskRecord:
        return self.with_state(task, OperationState.RUNNING, to_machine=machine_of(task))

    def _removed(self, old: TaskRecord, job: JobRecord) -> None:
        if old.operation is None or old.operation.kind is not OperationKind.REMOVE:
            old = self.removing(old, job)
        self.close(replace(old, placement=None), OperationState.DONE)

    def removing(
        self, task: TaskRecord, job: JobRecord, state: OperationState = OperationState.RUNNING
    ) -> TaskRecord:
        """Return a task with an operation that removes it; withdraws its present operation."""
        task = self.close(task, OperationState.WITHDRAWN, "the task is no longer wanted")
        cause = Cause.SURGE if task.extra else Cause.RESIZE
        cause = Cause.STOP if job.stopping else cause
        return self.open(task, OperationKind.REMOVE, cause, state=state)


def with_proposed(
    record: JobRecord,
    task: TaskRecord,
    now: Moment,
    kind: OperationKind,
    cause: Cause,
    reason: str,
    to: str = "",
) -> JobRecord:
    """Return the record with a proposed operation on one of its tasks, to the machine `to`."""
    ledger, proposed = OperationLedger(record, now), OperationState.PROPOSED
    opened = ledger.open(task, kind, cause, reason, proposed)
    opened = ledger.with_state(opened, proposed, to_machine=to)
    tasks = [opened if known is task else known for known in record.tasks]
    return replace(record, tasks=tasks, operations=ledger.opened)


def is_crash_to_log(old: TaskRecord, task: TaskRecord) -> bool:
    """Return whether a crash is logged: the 1st, 2nd, 4th, 8th, … of one run.

    So a crash loop adds few events, and does not push other events out of the log.
    """
    if (
        old.generation != task.generation
        or _crash_count(task).bit_length() <= _crash_count(old).bit_length()
    ):
        return False
    # after a start of this process an agent's first report may be about the past
    return old.invocation_id != "" or task.restarts == 0


def _crash_count(task: TaskRecord) -> int:
    """Return how often a run of a task ended by itself."""
    return task.restarts + (task.state in (TaskState.BACKOFF, TaskState.FAILED))


def last_started_version(task: TaskRecord) -> int:
    """Return the version that a task ran last: its own, unless it has not started as that yet."""
    known = task.operation
    is_coming = task.phase in (TaskPhase.PENDING, TaskPhase.STARTING)
    if is_coming and task.state in _NOT_UP and known is not None and known.ran:
        return known.ran
    return task.version


def is_being_removed(task: TaskRecord) -> bool:
    """Return whether a task is being removed for good."""
    return task.operation is not None and task.operation.kind is OperationKind.REMOVE


def waits(task: TaskRecord) -> bool:
    """Return whether an operation on the task has not begun."""
    return task.operation is not None and task.operation.state in WAITING


def is_acknowledged(task: TaskRecord) -> bool:
    """Return whether the operation on the task is approved and has not begun."""
    return task.operation is not None and task.operation.state is OperationState.ACKNOWLEDGED


def is_offered(task: TaskRecord) -> bool:
    """Return whether the operation on the task waits for its controller."""
    return task.operation is not None and task.operation.state is OperationState.OFFERED


def approval(task: TaskRecord, *, asks: bool, forced: bool) -> str:
    """Return what approved an operation; empty: it needed no approval."""
    known = task.operation.approved if task.operation is not None else ""
    return known or (DEADLINE if asks and forced else "")


def machine_of(task: TaskRecord) -> str:
    """Return the machine of a task; empty: it has none."""
    return task.placement.machine if task.placement is not None else ""
