"""What happens to the tasks of a job next: one decision, of what is wanted and what is seen.

    observe -> resize -> propose -> (targets) -> offer, begin -> (machines) -> apply

In brackets stands what the allocator is asked, each in one request for all tasks. All that an
owner could mind counts against one availability budget, `update.max_unavailable`: while that
many tasks do not serve, for whatever reason, nothing more is taken down (SC6). What is broken
anyway may be replaced, as long as no more than the budget is under way at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.spread import fullest_first
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, spec_of
from control_plane.api.operations import (
    DEADLINE,
    STOP,
    Cause,
    JobEvent,
    Operation,
    OperationKind,
    OperationState,
)
from control_plane.api.policy import Property
from control_plane.scheduler.core.consulting import (
    OFFERED_MAX,
    is_controlled,
    take_in,
)
from control_plane.scheduler.core.moment import Moment
from control_plane.scheduler.core.operations import Ledger, is_going, waits
from control_plane.scheduler.core.reconcile import available, observe
from control_plane.scheduler.core.rollout import (
    HOMELESS,
    Placed,
    apply_plan,
    is_moving,
    is_overdue,
    is_quiet,
    must_move,
    prune,
    take_down,
    wanted_tasks,
)
from control_plane.task_control.core.talk import Heard

_UP = (TaskPhase.STARTING, TaskPhase.RUNNING)


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
    heard: Heard = field(default_factory=Heard)
    """What the job's controller said last, if it has one."""


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
    serving: frozenset[int] = field(default=frozenset())
    """Tasks that may not be missed: those of `chosen` go only within the budget."""
    budget: int = 0
    """How many of `serving` may go …"""
    slots: int = 0
    """… and how many that do not serve may be replaced."""

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
    made.record = _kept(made)
    made._took(_resized(made, seen))
    made.record = prune(made.record)
    if made.record.paused and any(t.version != made.record.version for t in made.record.tasks):
        made.detail = f"the update to version {made.record.version} is paused"
    made.record = take_in(made.record, seen.view, seen.heard, made.ledger, seen.now)
    made.record = _begin_removals(made, seen)
    _propose(made, seen)
    return made


def go_on(made: Decision, found: Found, seen: Seen) -> None:
    """Begin what may begin now, in the decision."""
    begun, generation = list[TaskRecord](), made.record.generation
    asks, overdue = is_controlled(made.record), frozenset(made.overdue)
    chosen = frozenset(made.chosen)
    ready = chosen & found.ready
    going = _going(made, ready, asks=asks) | overdue
    for task in made.record.tasks:
        asked = task.index in ready or (asks and task.index in chosen and _may_stay(task))
        if asked and task.index not in going:
            task = _offered(made.ledger, task)
        elif task.index in going:
            generation += 1
            approved = _approval(task, asks=asks, forced=task.index in overdue)
            task = made.ledger.to(task, OperationState.RUNNING, approved=approved)
            task = take_down(task, generation, seen.now)
        begun.append(task)
    made.record = replace(
        made.record, tasks=begun, generation=generation, operations=made.ledger.opened
    )
    waiting = sum(1 for task in begun if _is_offered(task)) if asks else 0
    if waiting and made.record.spec.controller is not None:
        name, s = made.record.spec.controller.name, "" if waiting == 1 else "s"
        made.detail = made.detail or f"{waiting} operation{s} wait for the controller {name}"
    made.detail = found.detail or made.detail


def remaining(record: JobRecord, seen: Seen) -> tuple[int, ...]:
    """Return the indexes of the tasks that a job has once its size is what is wanted."""
    made = Decision(record, Ledger(record, seen.now))
    made.record = _kept(made)
    after = _resized(made, seen)
    return tuple(task.index for task in after.tasks if not is_going(task))


def settle(made: Decision, placed: Placed, now: Moment) -> None:
    """Take the machines in that the allocator gave."""
    made._took(apply_plan(made.record, placed, now))


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
            if task.listed and is_controlled(record):
                tasks.append(ledger.removing(task, record, OperationState.OFFERED))
                continue
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
    does so, too, unless its old copy is to be handled by rules of its own, or a controller has
    yet to say that it shall go. Its generation rises: should the old copy be back after all, it
    is not taken for the newest version (BUG-TC1).
    """
    if all(task.version == record.version for task in record.tasks):
        return record

    generation = record.generation

    def wants(task: TaskRecord) -> TaskRecord:
        nonlocal generation
        if task.version == record.version or is_going(task):
            return task
        waits_here = task.phase is TaskPhase.PENDING
        is_lost = task.phase is TaskPhase.LOST and bool(task.reason)
        same = spec_of(record, task).disconnect == record.spec.disconnect
        if waits_here or (is_lost and same and not _is_offered(task)):
            generation += 1
            changed = {"version": record.version, "generation": generation}
            return replace(task, reason="", attempts=0, **changed)
        return task

    tasks = [wants(task) for task in record.tasks]
    return replace(record, tasks=tasks, generation=generation)


def _begin_removals(made: Decision, seen: Seen) -> JobRecord:
    """Return the record with removals begun that were asked about and may go now."""
    record, ledger, generation = made.record, made.ledger, made.record.generation
    asks, tasks = is_controlled(record), list[TaskRecord]()
    for task in record.tasks:
        if is_going(task) and waits(task):
            forced = is_overdue(task, seen.view)
            if _is_let(task) or forced:
                generation += 1
                approved = _approval(task, asks=asks, forced=forced)
                task = ledger.to(task, OperationState.RUNNING, approved=approved)
                task = take_down(task, generation, seen.now)
        tasks.append(task)
    if generation == record.generation:
        return record
    return replace(record, tasks=tasks, generation=generation)


def _kept(made: Decision) -> JobRecord:
    """Return the record without removals that have not begun, where the tasks are wanted again."""
    record = made.record
    waiting = [task for task in record.tasks if is_going(task) and waits(task)]
    staying = sum(1 for task in record.tasks if not is_going(task))
    kept = {task.index for task in waiting[: max(0, wanted_tasks(record) - staying)]}
    if not kept:
        return record
    reason = "the task is wanted again"
    tasks = [
        made.ledger.close(task, OperationState.WITHDRAWN, reason) if task.index in kept else task
        for task in record.tasks
    ]
    return replace(record, tasks=tasks)


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
    """Return which tasks go: who is missed least, of equals those in the fullest bins.

    Those that are nowhere go first, then those that are known not to serve, those of machines
    that do not answer, and only then those that serve: failures count against the budget, so
    nothing that serves is given up for what does not (BUG-CP24). With nothing seen, as in a
    plan, all that clients may use are equals.
    """
    if number >= len(staying):
        return frozenset(task.index for task in staying)
    classes: tuple[list[int], ...] = ([], [], [], [])
    for task in reversed(staying):
        classes[_missed(task, seen.view)].append(task.index)
    gone = classes[0][:number]
    for equals in classes[1:]:
        left, among = number - len(gone), frozenset(equals)
        if left >= len(equals):
            gone += equals
            continue
        claims = [claim for claim in seen.claims if claim.task in among]
        fullest = [] if seen.evened is None else fullest_first(claims, seen.evened, left)
        chosen = frozenset(fullest)
        gone += [*fullest, *(index for index in equals if index not in chosen)][:left]
        break
    return frozenset(gone)


def _missed(task: TaskRecord, view: View) -> int:
    """Return how much a task would be missed, from 0: not at all, to 3: it serves."""
    if task.phase in HOMELESS:
        return 0
    if task.phase is not TaskPhase.RUNNING or not task.listed:
        return 1
    return 3 if available(task, view) else 2


# -- what is proposed


def _propose(made: Decision, seen: Seen) -> None:
    """Choose what may be done now within the budget, and propose it."""
    record, view = made.record, seen.view
    within = [task for task in record.tasks if not (record.stopping or is_going(task))]
    serving, due, late = set[int](), dict[int, TaskRecord](), set[int]()
    for task in within:
        if available(task, view):
            serving.add(task.index)
        machine = view.get(task.placement.machine) if task.placement is not None else None
        if machine is None or not (machine.up and machine.answering and task.phase in _UP):
            continue
        if _is_outdated(task, record) or machine.leaving:
            due[task.index] = task
            if machine.overdue:
                late.add(task.index)
    quiet = not due and len(serving) == len(within) and is_quiet(record)
    repairs = seen.repairs if quiet else ()
    due |= {task.index: task for task in within if task.index in repairs}
    most = record.spec.update.max_unavailable
    serving -= late  # they go now, whatever the budget says: nothing else may go for them
    rest = (task for task in due.values() if task.index not in late)
    first = sorted(rest, key=lambda task: (not waits(task), task.index))
    broken = [task.index for task in first if task.index not in serving]
    healthy = [task.index for task in first if task.index in serving]
    others_down = len(within) - len(serving) - len(broken)
    slots, budget = most - others_down, most - (len(within) - len(serving))
    made.serving, made.slots, made.budget = frozenset(serving), slots, budget
    if is_controlled(record):  # who is asked chooses among all of them
        chosen = (broken + healthy)[:OFFERED_MAX]
    else:
        chosen = broken[: max(0, slots)] + healthy[: max(0, budget)]
    made.overdue, made.chosen = tuple(sorted(late)), tuple(chosen)
    made.moving = frozenset(i for i in chosen if must_move(due[i], view) or i in repairs)
    picked = late | set(chosen)
    if picked or any(task.operation is not None for task in record.tasks):
        tasks = [_proposed(made, task, due, picked, seen) for task in record.tasks]
        made.record = replace(record, tasks=tasks, operations=made.ledger.opened)
    if healthy and budget <= 0 and not any(is_moving(task) for task in within):
        down = len(within) - len(serving)
        made.detail = (
            f"{down} of {len(within)} tasks are unavailable and at most {most} may be;"
            " the update waits"
        )


def _is_outdated(task: TaskRecord, record: JobRecord) -> bool:
    return task.version != record.version and not record.paused


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
        # one whose machine does not answer for a moment is needed as before
        is_needed = (
            task.index in due or _is_outdated(task, made.record) or must_move(task, seen.view)
        )
        if is_needed and known.kind is kind:
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


# -- what begins


def _going(made: Decision, ready: frozenset[int], *, asks: bool) -> frozenset[int]:
    """Return which tasks go now: those that were acknowledged, as far as the budget allows."""
    known = {task.index: task for task in made.record.tasks}
    left = {True: made.budget, False: made.slots}
    going = set[int]()
    for index in made.chosen:
        is_serving = index in made.serving
        task = known[index]
        may_go = index in ready or _stops(task)
        if may_go and left[is_serving] > 0 and (not asks or _is_let(task)):
            left[is_serving] -= 1
            going.add(index)
    return frozenset(going)


def _may_stay(task: TaskRecord) -> bool:
    """Return whether an owner may choose otherwise than to move, for which there may be no room."""
    causes = (Cause.MAINTENANCE, Cause.LOAN)
    return task.operation is not None and task.operation.cause in causes


def _stops(task: TaskRecord) -> bool:
    """Return whether a task needs no place elsewhere: it stops, and starts again where it is."""
    return task.operation is not None and task.operation.instead == STOP


def _is_let(task: TaskRecord) -> bool:
    return task.operation is not None and task.operation.state is OperationState.ACKNOWLEDGED


def _is_offered(task: TaskRecord) -> bool:
    return task.operation is not None and task.operation.state is OperationState.OFFERED


def _offered(ledger: Ledger, task: TaskRecord) -> TaskRecord:
    """Return a task whose operation waits for who may object."""
    if task.operation is not None and task.operation.state is OperationState.PROPOSED:
        return ledger.to(task, OperationState.OFFERED)
    return task


def _approval(task: TaskRecord, *, asks: bool, forced: bool) -> str:
    """Return who let an operation begin; empty: nobody had to."""
    known = task.operation.approved if task.operation is not None else ""
    return known or (DEADLINE if asks and forced else "")
