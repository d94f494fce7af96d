"""What happens to the tasks of a job next: one decision from the wanted and the observed state.

    observe -> resize -> propose -> (targets) -> offer, begin -> (machines) -> apply

Steps in brackets ask the allocator, each in one request for all tasks. Every unavailable task
counts against one availability budget, `update.max_unavailable`. While that
many tasks do not serve, for any reason, no serving task is taken down (SC6). Broken tasks
may be replaced, as long as at most the budget is under way at once (ADR 0132).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced
from math import inf

from msgspec.structs import replace

from control_plane.agents.core.seen import SeenMachine
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.machines import EventKind
from control_plane.api.operations import (
    MUST_LEAVE,
    STOP,
    Cause,
    Operation,
    OperationKind,
    OperationState,
)
from control_plane.job_control.core.intents import (
    canary_of,
    is_held,
    is_plain,
    lapsed,
    target_of,
    written,
)
from control_plane.scheduler.core.approval import (
    OFFERED_MAX,
    is_controlled,
    with_answer,
)
from control_plane.scheduler.core.assignment import assigned, unified
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import Decision, Found, Room, Seen
from control_plane.scheduler.core.new_tasks import has_crashed, how_it_failed, is_failing
from control_plane.scheduler.core.operations import (
    Ledger,
    approval,
    is_going,
    is_let,
    is_offered,
    last_run,
    waits,
)
from control_plane.scheduler.core.owner_moves import is_moved, is_restarted
from control_plane.scheduler.core.reconcile import available, observe
from control_plane.scheduler.core.release import advance, at_once, begun
from control_plane.scheduler.core.rollout import (
    Placed,
    apply_plan,
    is_moving,
    is_quiet,
    must_move,
    prune,
    take_down,
)
from control_plane.scheduler.core.rollout_progress import describe_blocked
from control_plane.scheduler.core.sizing import begin_removals, kept, resized
from control_plane.scheduler.core.surge import spare, stood_in, surged
from control_plane.scheduler.core.task_versions import (
    cause_of_update,
    is_outdated,
    may_renew,
    renews,
)

_UP = (TaskPhase.STARTING, TaskPhase.RUNNING)
_VOLUNTARY = (
    *(Cause.RELEASE, Cause.CANARY, Cause.ROLLBACK, Cause.TRANSFER, Cause.REBALANCE, Cause.OWNER),
    *MUST_LEAVE,
)
_LEAVE_BECAUSE = {
    EventKind.REVOKED: Cause.LOAN,
    EventKind.PROFILE: Cause.PROFILE,
    EventKind.POWER_CAP: Cause.POWER,
}
"""Kind of event that takes a machine away → cause of moves from there; others: maintenance."""


def decide(record: JobRecord, seen: Seen) -> Decision:
    """Return the decision as far as it can be made without the allocator."""
    known = begun(lapsed(record, seen.now.wall))
    if not is_plain(known):
        known = assigned(known, unified(known, seen))
    made = Decision(known, Ledger(record, seen.now))
    made.took(observe(made.record, seen.view, seen.now))
    made.record = advance(made.record, record, made.ledger, seen.now)
    made.record = _canary_judged(made.record, record, made.ledger, seen.now)
    made.record = kept(made)
    made.took(resized(made, seen))
    made.took(surged(made, seen))
    made.record = prune(made.record)
    made.detail = describe_blocked(made.record, seen.now)
    made.record = with_answer(made.record, seen.view, seen.answer, made.ledger, seen.now)
    has_extras = any(task.extra for task in made.record.tasks)
    may_go = spare(made.record, seen.view) if has_extras else 0
    made.record = begin_removals(made, seen, may_go)
    _propose(made, seen)
    if made.waits_for_surge:
        made.detail = "it waits for its turn: other jobs use all extra tasks of the entitlement"
    return made


def begin_operations(made: Decision, found: Found, seen: Seen) -> None:
    """Begin, in the decision, the operations that may begin now."""
    begun, generation = list[TaskRecord](), made.record.generation
    asks, overdue = is_controlled(made.record), frozenset(made.overdue)
    chosen = frozenset(made.chosen)
    ready = chosen & found.ready
    stopping = frozenset[int]() if asks else _may_stop(made, found.without_room, seen)
    going = _going(made, ready | stopping, seen, asks=asks) | overdue
    for task in made.record.tasks:
        asked = task.index in ready or (asks and task.index in chosen and _may_stay(task))
        if asked and task.index not in going:
            task = _offered(made.ledger, task)
        elif task.index in going:
            generation += 1
            approved = approval(task, asks=asks, forced=task.index in overdue)
            instead = {"instead": STOP} if task.index in stopping - overdue else {}
            task = made.ledger.to(task, OperationState.RUNNING, approved=approved, **instead)
            task = take_down(task, generation, seen.now)
        begun.append(task)
    record = replace(made.record, tasks=begun, generation=generation)
    record = stood_in(record, seen.view, found.without_room - going)
    made.record = replace(record, operations=made.ledger.opened)
    waiting = sum(1 for task in begun if is_offered(task)) if asks else 0
    if waiting and made.record.spec.controller is not None:
        name, s = made.record.spec.controller.name, "" if waiting == 1 else "s"
        made.detail = made.detail or f"{waiting} operation{s} wait for the controller {name}"
    made.detail = found.detail or made.detail


def settle(made: Decision, placed: Placed, now: Moment) -> None:
    """Enter the machines from the allocator into the decision."""
    made.took(apply_plan(made.record, placed, now))


def _canary_judged(record: JobRecord, before: JobRecord, ledger: Ledger, now: Moment) -> JobRecord:
    """Return the record without the canary if one of its tasks failed since `before` (JC8).

    Its tasks go back as soon as the intents are composed again. A hold has priority.
    """
    canary = canary_of(record)
    if canary is None or is_held(record):
        return record
    earlier = {task.index: task for task in before.tasks} if before is not record else {}
    for task in record.tasks:
        if task.version != canary.version or is_going(task):
            continue
        if is_failing(task, record, now) or has_crashed(earlier.get(task.index), task):
            why = how_it_failed(task) or "it ended, and its agent started it again"
            reason = f"the canary ended: it failed on {record.name}-{task.index} ({why})"
            ledger.add_rollout_event(reason, OperationState.FAILED)
            writer = record.intents[Dimension.CANARY].writer
            return written(record, Dimension.CANARY, None, writer, now.wall, reason=reason[:512])
    return record


def _is_failed_trial(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task runs the version of an ended canary, and goes back."""
    return task.version in record.trials and is_outdated(task, record)


# -- proposing


def _propose(made: Decision, seen: Seen) -> None:
    """Choose the operations that the budget allows now, and propose them."""
    record, view = made.record, seen.view
    within = [task for task in record.tasks if not (record.stopping or is_going(task))]
    serving, due, late = set[int](), dict[int, TaskRecord](), set[int]()
    for task in within:
        if available(task, view):
            serving.add(task.index)
        machine = view.get(task.placement.machine) if task.placement is not None else None
        if machine is None or not (machine.up and machine.answering and task.phase in _UP):
            continue
        outdated = is_outdated(task, record) and not task.extra
        if machine.leaving or outdated or is_moved(task) or is_restarted(task):
            if task.index in serving and _can_wait(task, machine, seen):
                made.held.append(task.index)
                continue
            due[task.index] = task
            if machine.overdue:
                late.add(task.index)
    quiet = not due and len(serving) == len(within) and is_quiet(record)
    repairs = seen.repairs if quiet and not (seen.held_back or made.held) else ()
    due |= {task.index: task for task in within if task.index in repairs}
    if not (due or made.held or any(task.operation is not None for task in record.tasks)):
        return  # the common case
    serving -= late  # they leave now regardless of the budget, and reduce what is left of it
    rest = (task for task in due.values() if task.index not in late)
    first = sorted(rest, key=lambda t: (not _is_failed_trial(t, record), *_due_first(t, seen)))
    broken = [task.index for task in first if task.index not in serving]
    healthy = [task.index for task in first if task.index in serving]
    made.serving = frozenset(serving)
    made.room = _room(made, within, broken, seen)
    unpaced = {i for i, t in due.items() if must_move(t, view) or is_moved(t)}
    unpaced |= {i for i, t in due.items() if _is_failed_trial(t, record)}
    renewed = {
        i
        for i, t in due.items()
        if i not in unpaced and is_outdated(t, record) and renews(t, record)
    }
    room, chosen = replaced(made.room), list[int]()
    if is_controlled(record):  # the controller chooses among all of them
        room.serving = room.broken = OFFERED_MAX
        room.paced = None
    for index in broken + healthy:
        if room.take(serves=index in serving, updates=index in renewed):
            chosen.append(index)
    chosen = chosen[:OFFERED_MAX]
    made.overdue, made.chosen = tuple(sorted(late)), tuple(chosen)
    made.moving = frozenset(
        i for i in chosen if must_move(due[i], view) or i in repairs or is_moved(due[i])
    )
    picked = late | set(chosen)
    if picked or any(task.operation is not None for task in record.tasks):
        tasks = [_proposed(made, task, due, picked, seen) for task in record.tasks]
        made.record = replace(record, tasks=tasks, operations=made.ledger.opened)
    if healthy and made.room.serving <= 0 and not any(is_moving(task) for task in within):
        made.detail = _held_up(record, within, serving)
    if made.held and not picked:
        made.detail = made.detail or next(iter(seen.held_back.values()), "")


def _can_wait(task: TaskRecord, machine: SeenMachine, seen: Seen) -> bool:
    """Return whether a serving task is left alone because much capacity near it is lost."""
    if not seen.held_back or machine.overdue or task.placement is None:
        return False
    if task.placement.machine not in seen.held_back:
        return False
    event = machine.departure
    return event is None or event.kind not in (EventKind.REVOKED, EventKind.POWER_CAP)


def _room(made: Decision, within: Sequence[TaskRecord], broken: Sequence[int], seen: Seen) -> Room:
    """Return how many tasks may be taken down now: by the budget, and by the pace of the update."""
    record = made.record
    base = [task.index for task in within if not task.extra]
    standing_in = sum(1 for task in within if task.extra and task.index in made.serving)
    most = record.spec.update.max_unavailable + standing_in
    down = sum(1 for index in base if index not in made.serving)
    replaced_soon = len(frozenset(broken) & frozenset(base))
    fresh, batch = at_once(record, seen.now)
    paced = None
    if fresh or batch is not None:
        paced = max(0, most - down - fresh)
        paced = paced if batch is None else min(paced, batch)
    return Room(most - down, most - down + replaced_soon, may_renew(record), paced)


def _held_up(record: JobRecord, within: Sequence[TaskRecord], serving: set[int]) -> str:
    base = [task for task in within if not task.extra]
    down = sum(1 for task in base if task.index not in serving)
    most = record.spec.update.max_unavailable
    if most == 0:
        waiting = [task.reason for task in within if task.extra and task.reason]
        return "; ".join(["the update waits for an extra task", *waiting[:1]])
    return (
        f"{down} of {len(base)} tasks are unavailable and at most {most} may be; the update waits"
    )


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
    ran = last_run(task)
    if known is not None and waits(task) and _is_voluntary(known):
        # an operation stays needed while its machine does not answer for a moment
        is_needed = (
            task.index in due
            or is_outdated(task, made.record)
            or must_move(task, seen.view)
            or is_moved(task)
            or is_restarted(task)
        )
        if is_needed and known.kind is kind:
            if kind is not OperationKind.UPDATE or (known.cause, known.reason) == (cause, reason):
                return task
            return replace(task, operation=replace(known, cause=cause, reason=reason, ran=ran))
        task = made.ledger.close(task, OperationState.WITHDRAWN, "it is no longer needed")
    if task.index not in picked:
        return task
    if task.operation is not None:
        task = made.ledger.close(task, OperationState.WITHDRAWN, "a later operation replaces it")
    return made.ledger.open(task, kind, cause, reason, OperationState.PROPOSED, deadline, ran)


def _need(
    record: JobRecord, task: TaskRecord, seen: Seen
) -> tuple[OperationKind, Cause, str, float | None]:
    machine = seen.view.get(task.placement.machine) if task.placement is not None else None
    if is_moved(task) and task.operation is not None:
        return OperationKind.MOVE, task.operation.cause, task.operation.reason, None
    if machine is not None and (event := machine.departure) is not None:
        cause = _LEAVE_BECAUSE.get(event.kind, Cause.MAINTENANCE)
        return OperationKind.MOVE, cause, event.reason, event.deadline
    if (target := target_of(record, task)) != task.version:
        reason = f"version {target} instead of {last_run(task)}"
        return OperationKind.UPDATE, cause_of_update(record, task), reason, None
    if is_restarted(task) and task.operation is not None:
        return OperationKind.RESTART, Cause.OWNER, task.operation.reason, None
    return (
        OperationKind.MOVE,
        Cause.REBALANCE,
        "the tasks of the job are then spread more evenly",
        None,
    )


def _due_first(task: TaskRecord, seen: Seen) -> tuple[float, bool, bool, int]:
    """Return a task's sort key in the queue for the budget: the nearest deadline goes first.

    Among tasks without a deadline, waiting ones come first, but for those without room.
    """
    machine = seen.view.get(task.placement.machine) if task.placement is not None else None
    event = machine.departure if machine is not None else None
    deadline = event.deadline if event is not None else None
    is_stuck = task.index in seen.without_room
    return inf if deadline is None else deadline, is_stuck, not waits(task), task.index


def _is_voluntary(operation: Operation) -> bool:
    """Return whether an operation takes down a task that could continue to run."""
    return operation.cause in _VOLUNTARY and operation.kind is not OperationKind.START


# -- beginning


def _going(made: Decision, ready: frozenset[int], seen: Seen, *, asks: bool) -> frozenset[int]:
    """Return the tasks that are taken down now: acknowledged ones, as the budget allows."""
    known = {task.index: task for task in made.record.tasks}
    going = set[int]()
    for index in made.chosen:
        task = known[index]
        updates = task.operation is not None and task.operation.kind is OperationKind.UPDATE
        updates = updates and renews(task, made.record)
        is_capped = task.operation is not None and task.operation.cause is Cause.POWER
        if is_capped and seen.capped_moves is not None and made.capped >= seen.capped_moves:
            continue
        if not (index in ready or _stops(task)) or (asks and not is_let(task)):
            continue
        if made.room.take(serves=index in made.serving, updates=updates):
            made.capped += is_capped
            going.add(index)
    return frozenset(going)


def _may_stop(made: Decision, without_room: frozenset[int], seen: Seen) -> frozenset[int]:
    """Return which tasks may stop for a switch of host profile and restart on the same machine.

    No other machine has room for them. A switch has no deadline: tasks and machine would wait
    forever (BUG-CP53). It takes as long as a boot, so the budget decides.
    """
    return frozenset(
        task.index
        for task in made.record.tasks
        if task.index in without_room
        and task.operation is not None
        and task.operation.cause is Cause.PROFILE
        and task.placement is not None
        and (machine := seen.view.get(task.placement.machine)) is not None
        and machine.returning
    )


def _may_stay(task: TaskRecord) -> bool:
    """Return whether the controller is asked although there may be no room for a move.

    It may choose an alternative to the move.
    """
    return task.operation is not None and task.operation.cause in MUST_LEAVE


def _stops(task: TaskRecord) -> bool:
    """Return whether a task stops and restarts on its machine, so that it needs no other place."""
    return task.operation is not None and task.operation.instead == STOP


def _offered(ledger: Ledger, task: TaskRecord) -> TaskRecord:
    """Return the task with its proposed operation offered to the controller."""
    if task.operation is not None and task.operation.state is OperationState.PROPOSED:
        return ledger.to(task, OperationState.OFFERED)
    return task
