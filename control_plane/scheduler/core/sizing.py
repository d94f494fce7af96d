"""How many tasks a job shall have, which of them go, and which version those get that are new."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.agents.core.seen import View
from control_plane.allocator.core.spread import fullest_first
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationState
from control_plane.scheduler.core.approval import is_controlled, was_let
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import waits_for
from control_plane.scheduler.core.decision import Decision, Seen
from control_plane.scheduler.core.operations import (
    Ledger,
    approval,
    is_going,
    is_let,
    waits,
)
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.core.release import is_held, starts_as
from control_plane.scheduler.core.rollout import HOMELESS, is_overdue, take_down, wanted_tasks


def remaining(record: JobRecord, seen: Seen) -> tuple[int, ...]:
    """Return the indexes of the tasks that a job has once its size is what is wanted."""
    made = Decision(record, Ledger(record, seen.now))
    made.record = kept(made)
    after = resized(made, seen)
    return tuple(task.index for task in after.tasks if not (is_going(task) or task.extra))


def resized(made: Decision, seen: Seen) -> JobRecord:
    """Return the record with missing tasks added and surplus ones on their way out.

    A task keeps its index for life, so a job may have holes in its indexes: what is missing
    gets the lowest free ones, and what is too much goes from where most tasks stand. They go
    all at once: nobody counts on them any more. They are drained like any other.
    """
    record, now = _with_newest(made.record), seen.now
    staying = [
        task for task in record.tasks if not is_going(task) and (record.stopping or not task.extra)
    ]
    missing = wanted_tasks(record) - len(staying)
    if missing == 0:
        return record
    if missing > 0:
        return replace(record, tasks=_with_new(record, missing, now))
    made.record = record
    return without(made, _surplus(staying, -missing, seen), now)


def without(made: Decision, surplus: frozenset[int], now: Moment) -> JobRecord:
    """Return the record with some tasks on their way out, or to be asked about.

    A controller is asked about those that serve, and those it let go for something else: that it
    let a task be updated says nothing of its removal.
    """
    record, ledger = made.record, made.ledger
    generation, tasks = record.generation, list[TaskRecord]()
    asks = is_controlled(record)
    for task in record.tasks:
        if task.index in surplus:
            is_down = task.phase in (TaskPhase.DRAINING, TaskPhase.STOPPING)
            is_lent = asks and was_let(task) and task.phase is not TaskPhase.LOST
            if is_lent and (is_down or (task.placement is None and not task.reason)):
                tasks.append(task)  # it was let go to come back: its removal is asked for then
                continue
            if task.placement is None:
                continue
            if asks and (task.listed or is_lent):
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

    Nothing of them runs that an update would have to take down. What they wait for is perhaps
    just what the newest version does not need (BUG-AL1). While that version is with its
    canaries, or was halted, none of them gets it. A lost task keeps the version that it was
    started with until it is placed elsewhere (`placed_as`): its old copy may run (BUG-CP30).
    """
    if all(task.version == record.version for task in record.tasks) or is_held(record):
        return record

    generation = record.generation

    def wants(task: TaskRecord) -> TaskRecord:
        nonlocal generation
        if task.version == record.version or is_going(task):
            return task
        if task.phase is not TaskPhase.PENDING or waits_for(record, task, record.spec):
            return task
        generation += 1
        changed = {"version": record.version, "generation": generation}
        return replace(task, reason="", attempts=0, **changed)

    tasks = [wants(task) for task in record.tasks]
    return replace(record, tasks=tasks, generation=generation)


def goes_on(task: TaskRecord, view: View) -> bool:
    """Return whether a task serves, and its machine does not force it out now."""
    return available(task, view) and not is_overdue(task, view)


def begin_removals(made: Decision, seen: Seen, spare: int) -> JobRecord:
    """Return the record with removals begun that were asked about and may go now.

    Of extra tasks that serve at most `spare` go: others do not serve, and these stand in for them.
    """
    record, ledger, generation = made.record, made.ledger, made.record.generation
    asks, tasks = is_controlled(record), list[TaskRecord]()
    for task in record.tasks:
        if is_going(task) and waits(task):
            forced = is_overdue(task, seen.view)
            stands_in = task.extra and goes_on(task, seen.view)
            if forced or (is_let(task) and (spare > 0 or not stands_in)):
                spare -= stands_in
                generation += 1
                approved = approval(task, asks=asks, forced=forced)
                task = ledger.to(task, OperationState.RUNNING, approved=approved)
                task = take_down(task, generation, seen.now)
        tasks.append(task)
    if generation == record.generation:
        return record
    return replace(record, tasks=tasks, generation=generation)


def kept(made: Decision) -> JobRecord:
    """Return the record without removals that have not begun, where the tasks are wanted again."""
    record = made.record
    waiting = [t for t in record.tasks if is_going(t) and waits(t) and not t.extra]
    staying = sum(1 for task in record.tasks if not (is_going(task) or task.extra))
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
                    version=starts_as(record),
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
