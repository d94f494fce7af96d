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

from msgspec.structs import replace

from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.operations import (
    MUST_LEAVE,
    STOP,
    Cause,
    OperationKind,
    OperationState,
)
from control_plane.job_control.core.intents import (
    canary_of,
    is_held,
    is_plain,
    lapsed,
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
from control_plane.scheduler.core.needed_operations import (
    can_wait,
    due_first,
    is_failed_trial,
    is_voluntary,
    need,
)
from control_plane.scheduler.core.new_tasks import PLACED, has_crashed, how_it_failed, is_failing
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
    host_of,
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
    is_outdated,
    may_renew,
    renews,
)


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


# -- proposing


def _propose(made: Decision, seen: Seen) -> None:
    """Choose the operations that the budget allows now, and propose them."""
    record = made.record
    within = [task for task in record.tasks if not (record.stopping or is_going(task))]
    serving, due, late, repairs = _due(made, within, seen)
    if not (due or made.held or any(task.operation is not None for task in record.tasks)):
        return  # the common case
    serving -= late  # they leave now regardless of the budget, and reduce what is left of it
    made.serving, made.overdue = frozenset(serving), tuple(sorted(late))
    made.chosen = _chosen(made, within, {i: t for i, t in due.items() if i not in late}, seen)
    made.moving = frozenset(
        i for i in made.chosen if must_move(due[i], seen.view) or i in repairs or is_moved(due[i])
    )
    picked = late | set(made.chosen)
    if picked or any(task.operation is not None for task in record.tasks):
        tasks = [_proposed(made, task, due, picked, seen) for task in record.tasks]
        made.record = replace(record, tasks=tasks, operations=made.ledger.opened)
    has_healthy = any(index in serving for index in due)
    if has_healthy and made.room.serving <= 0 and not any(is_moving(task) for task in within):
        made.detail = _held_up(record, within, serving)
    if made.held and not picked:
        made.detail = made.detail or next(iter(seen.held_back.values()), "")


def _due(
    made: Decision, within: Sequence[TaskRecord], seen: Seen
) -> tuple[set[int], dict[int, TaskRecord], set[int], Sequence[int]]:
    """Return the tasks that serve, and those that need an operation.

    Of the latter, those that are overdue, and those that only make the spread more even.
    """
    record, view = made.record, seen.view
    serving, due, late = set[int](), dict[int, TaskRecord](), set[int]()
    for task in within:
        if available(task, view):
            serving.add(task.index)
        machine = host_of(task, view)
        if machine is None or not (machine.up and machine.answering and task.phase in PLACED):
            continue
        outdated = is_outdated(task, record) and not task.extra
        if machine.leaving or outdated or is_moved(task) or is_restarted(task):
            if task.index in serving and can_wait(task, machine, seen):
                made.held.append(task.index)
                continue
            due[task.index] = task
            if machine.overdue:
                late.add(task.index)
    quiet = not due and len(serving) == len(within) and is_quiet(record)
    repairs = seen.repairs if quiet and not (seen.held_back or made.held) else ()
    due |= {task.index: task for task in within if task.index in repairs}
    return serving, due, late, repairs


def _chosen(
    made: Decision, within: Sequence[TaskRecord], due: Mapping[int, TaskRecord], seen: Seen
) -> tuple[int, ...]:
    """Return those of the due tasks whose operations may begin within the budget, in order."""
    record = made.record
    first = sorted(
        due.values(), key=lambda t: (not is_failed_trial(t, record), *due_first(t, seen))
    )
    broken = [task.index for task in first if task.index not in made.serving]
    healthy = [task.index for task in first if task.index in made.serving]
    made.room = _room(made, within, broken, seen)
    unpaced = {i for i, t in due.items() if must_move(t, seen.view) or is_moved(t)}
    unpaced |= {i for i, t in due.items() if is_failed_trial(t, record)}
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
        if room.take(serves=index in made.serving, updates=index in renewed):
            chosen.append(index)
    return tuple(chosen[:OFFERED_MAX])


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
    kind, cause, reason, deadline = need(made.record, task, seen)
    ran = last_run(task)
    if known is not None and waits(task) and is_voluntary(known):
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
