"""What happens to the tasks of a job next: one decision, of what is wanted and what is seen.

    observe -> resize -> propose -> (targets) -> offer, begin -> (machines) -> apply

In brackets stands what the allocator is asked, each in one request for all tasks. All that an
owner could mind counts against one availability budget, `update.max_unavailable`: while that
many tasks do not serve, for whatever reason, nothing more is taken down (SC6). What is broken
anyway may be replaced, as long as no more than the budget is under way at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.spread import fullest_first
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, spec_of
from control_plane.api.operations import Cause, JobEvent, Operation, OperationKind, OperationState
from control_plane.api.policy import Property
from control_plane.scheduler.core.moment import Moment
from control_plane.scheduler.core.operations import Ledger, is_going, waits
from control_plane.scheduler.core.reconcile import available, observe
from control_plane.scheduler.core.rollout import (
    Placed,
    apply_plan,
    is_moving,
    is_overdue,
    is_quiet,
    is_reachable,
    must_move,
    prune,
    take_down,
    wanted_tasks,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision is based on, besides the record."""

    view: View
    now: Moment
    claims: Iterable[Claim] = ()
    """The job's, which say where its tasks stand."""
    evened: Property | None = Property.MSB
    """Over what the job is spread; None: it is not."""
    repairs: tuple[int, ...] = ()
    """Tasks whose move makes the spread more even."""
    acknowledged: Callable[[Operation], bool] = lambda _: True
    """Whether who may object does not. A job without a controller objects to nothing."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the places of tasks that are to be updated or moved."""

    ready: frozenset[int] = frozenset()
    """They have a place, and their image is there."""
    detail: str = ""
    """Why others are not."""


@dataclass(slots=True)
class Decision:
    """A job as it will be, and what comes of it."""

    record: JobRecord
    ledger: Ledger
    chosen: tuple[int, ...] = ()
    """Tasks whose operations may begin now, as far as the budget goes, once they have a place."""
    overdue: tuple[int, ...] = ()
    """Tasks that must leave now, whatever stands against it."""
    detail: str = ""
    """Why nothing goes on, if so."""
    moving: frozenset[int] = field(default=frozenset())
    """Those of `chosen` that need another machine."""

    @property
    def events(self) -> list[JobEvent]:
        """Return what the log has to say of this decision."""
        return self.ledger.events

    def _took(self, record: JobRecord) -> None:
        self.record = self.ledger.follow(self.record, record)


def decide(record: JobRecord, seen: Seen) -> Decision:
    """Return the decision as far as it can be made without asking for places."""
    made = Decision(record, Ledger(record, seen.now))
    made._took(observe(record, seen.view, seen.now))
    made._took(_resized(made, seen))
    made.record = prune(made.record)
    _propose(made, seen)
    return made


def go_on(made: Decision, found: Found, seen: Seen) -> None:
    """Begin what may begin now, in the decision."""
    now, begun = seen.now, list[TaskRecord]()
    generation = made.record.generation
    chosen, overdue = frozenset(made.chosen), frozenset(made.overdue)
    for task in made.record.tasks:
        if task.index in overdue or (task.index in chosen and task.index in found.ready):
            task = _acknowledged(made.ledger, task, seen)
            operation = task.operation
            assert operation is not None
            if task.index in overdue or operation.state is OperationState.ACKNOWLEDGED:
                generation += 1
                task = made.ledger.to(task, OperationState.RUNNING)
                task = take_down(task, generation, now)
        begun.append(task)
    made.record = replace(
        made.record, tasks=begun, generation=generation, operations=made.ledger.opened
    )
    made.detail = found.detail or made.detail


def remaining(record: JobRecord, seen: Seen) -> tuple[int, ...]:
    """Return the indexes of the tasks that a job has once its size is what is wanted."""
    after = _resized(Decision(record, Ledger(record, seen.now)), seen)
    return tuple(task.index for task in after.tasks if not is_going(task))


def settle(made: Decision, placed: Placed, now: Moment) -> None:
    """Take the machines in that the allocator gave."""
    made._took(apply_plan(made.record, placed, now))


def needs_place(made: Decision) -> bool:
    """Return whether anything must be known of places before the decision can go on."""
    return bool(made.chosen)


# -- how many there shall be


def _resized(made: Decision, seen: Seen) -> JobRecord:
    """Return the record with missing tasks added and surplus ones on their way out.

    A task keeps its index for life, so a job may have holes in its indexes: what is missing
    gets the lowest free ones, and what is too much goes from where most tasks stand. They go
    all at once: nobody counts on them any more. They are drained like any other.
    """
    record, ledger, now = _with_newest(made.record), made.ledger, seen.now
    staying = [task for task in record.tasks if not is_going(task)]
    missing = wanted_tasks(record) - len(staying)
    if missing == 0:
        return record
    if missing > 0:
        return replace(record, tasks=_with_new(record, missing, now))
    surplus = _surplus(staying, -missing, seen)
    generation, tasks = record.generation, list[TaskRecord]()
    for task in record.tasks:
        if task.index in surplus:
            if task.placement is None:
                continue
            is_down = task.phase in (TaskPhase.DRAINING, TaskPhase.STOPPING)
            task = ledger.removing(task, record)
            if not is_down:
                generation += 1
                task = take_down(task, generation, now)
        tasks.append(task)
    return replace(record, tasks=tasks, generation=generation)


def _with_newest(record: JobRecord) -> JobRecord:
    """Return the record in which tasks that wait for a machine want the newest version.

    Nothing of them runs that an update would have to take down, and what they wait for is
    perhaps just what the newest version does not need (BUG-AL1). One whose machine was lost
    does so, too, unless its old copy is to be handled by rules of its own.
    """
    if all(task.version == record.version for task in record.tasks):
        return record

    def wants(task: TaskRecord) -> TaskRecord:
        if task.version == record.version or is_going(task):
            return task
        waits_here = task.phase is TaskPhase.PENDING
        is_lost = task.phase is TaskPhase.LOST and bool(task.reason)
        same = spec_of(record, task).disconnect == record.spec.disconnect
        if waits_here or (is_lost and same):
            return replace(task, version=record.version, reason="", attempts=0)
        return task

    return replace(record, tasks=[wants(task) for task in record.tasks])


def _with_new(record: JobRecord, missing: int, now: Moment) -> list[TaskRecord]:
    known = {task.index for task in record.tasks}
    tasks, index = list(record.tasks), 0
    while missing:
        if index not in known:
            missing -= 1
            tasks.append(
                TaskRecord(
                    index=index,
                    version=record.version,
                    generation=record.generation,
                    since=now.wall,
                    begun=now.steady,
                )
            )
        index += 1
    tasks.sort(key=lambda task: task.index)
    return tasks


def _surplus(staying: Sequence[TaskRecord], number: int, seen: Seen) -> frozenset[int]:
    """Return which tasks go: those that are nowhere, then those in the fullest bins."""
    if number >= len(staying):
        return frozenset(task.index for task in staying)
    nowhere = (TaskPhase.PENDING, TaskPhase.LOST)
    homeless = [task.index for task in reversed(staying) if task.phase in nowhere]
    gone = homeless[:number]
    placed = {task.index for task in staying if task.phase not in nowhere}
    claims = [claim for claim in seen.claims if claim.task in placed]
    if seen.evened is not None and len(gone) < number:
        gone += fullest_first(claims, seen.evened, number - len(gone))
    chosen = set(gone)
    rest = [task.index for task in reversed(staying) if task.index not in chosen]
    return frozenset(chosen | set(rest[: number - len(chosen)]))


# -- what is proposed


def _propose(made: Decision, seen: Seen) -> None:
    """Choose what may be done now within the budget, and propose it."""
    record, view = made.record, seen.view
    within = [task for task in record.tasks if not (record.stopping or is_going(task))]
    serving = {task.index for task in within if available(task, view)}
    due = {task.index: task for task in within if _is_due(task, record, view)}
    quiet = not due and len(serving) == len(within) and is_quiet(record)
    repairs = seen.repairs if quiet else ()
    due |= {task.index: task for task in within if task.index in repairs}
    most = record.spec.update.max_unavailable
    late = {index for index, task in due.items() if is_overdue(task, view)}
    serving -= late  # they go now, whatever the budget says: nothing else may go for them
    rest = (task for task in due.values() if task.index not in late)
    first = sorted(rest, key=lambda task: (not waits(task), task.index))
    broken = [task.index for task in first if task.index not in serving]
    healthy = [task.index for task in first if task.index in serving]
    others_down = len(within) - len(serving) - len(broken)
    slots, budget = most - others_down, most - (len(within) - len(serving))
    chosen = broken[: max(0, slots)] + healthy[: max(0, budget)]
    made.overdue, made.chosen = tuple(sorted(late)), tuple(chosen)
    made.moving = frozenset(i for i in chosen if must_move(due[i], view) or i in repairs)
    picked = late | set(chosen)
    tasks = [_proposed(made, task, due, picked, seen) for task in record.tasks]
    made.record = replace(record, tasks=tasks, operations=made.ledger.opened)
    if healthy and budget <= 0 and not any(is_moving(task) for task in within):
        down = len(within) - len(serving)
        made.detail = (
            f"{down} of {len(within)} tasks are unavailable and at most {most} may be;"
            " the update waits"
        )


def _is_due(task: TaskRecord, record: JobRecord, view: View) -> bool:
    """Return whether a task is outdated, or must move, and can be reached to do so."""
    outdated = task.version != record.version or must_move(task, view)
    up = task.phase in (TaskPhase.STARTING, TaskPhase.RUNNING)
    return outdated and up and is_reachable(task, view)


def _proposed(
    made: Decision,
    task: TaskRecord,
    due: Mapping[int, TaskRecord],
    picked: set[int],
    seen: Seen,
) -> TaskRecord:
    """Return a task with the operation that it needs, and without one that it does not."""
    known = task.operation
    if known is None and task.index not in picked:
        return task
    kind, cause, reason, deadline = _need(made.record, task, seen)
    if known is not None and waits(task) and _is_voluntary(known):
        if task.index in due and known.kind is kind:
            return task
        task = made.ledger.close(task, OperationState.WITHDRAWN, "it is not needed any more")
    if task.index not in picked:
        return task
    if task.operation is not None:
        task = made.ledger.close(task, OperationState.WITHDRAWN, "overtaken by what follows")
    return made.ledger.open(task, kind, cause, reason, OperationState.PROPOSED, deadline)


def _need(
    record: JobRecord, task: TaskRecord, seen: Seen
) -> tuple[OperationKind, Cause, str, float | None]:
    machine = seen.view.get(task.placement.machine) if task.placement is not None else None
    if machine is not None and machine.leaving:
        cause = Cause.LOAN if machine.called_back else Cause.MAINTENANCE
        return OperationKind.MOVE, cause, machine.leaving_reason, machine.deadline
    if task.version != record.version:
        reason = f"version {record.version} instead of {task.version}"
        return OperationKind.UPDATE, Cause.RELEASE, reason, None
    return OperationKind.MOVE, Cause.REBALANCE, "the job stands more evenly then", None


def _is_voluntary(operation: Operation) -> bool:
    """Return whether an operation takes down a task that might as well go on."""
    causes = (Cause.RELEASE, Cause.MAINTENANCE, Cause.LOAN, Cause.REBALANCE)
    return operation.cause in causes and operation.kind is not OperationKind.START


def _acknowledged(ledger: Ledger, task: TaskRecord, seen: Seen) -> TaskRecord:
    """Return a task whose operation was offered, and acknowledged if nobody objects."""
    assert task.operation is not None
    if task.operation.state is OperationState.PROPOSED:
        task = ledger.to(task, OperationState.OFFERED)
    operation = task.operation
    assert operation is not None
    if operation.state is OperationState.OFFERED and seen.acknowledged(operation):
        task = ledger.to(task, OperationState.ACKNOWLEDGED)
    return task
