"""Decides the next operations on a job's tasks from their wanted and their observed state.

    observe -> resize -> propose -> (targets) -> offer, begin -> (machines) -> apply

Steps in brackets call the allocator, each with one request for all tasks. Every unavailable task
counts against one availability budget, `update.max_unavailable`. While that many tasks do not
serve, for any reason, no serving task is taken down (SC6). Broken tasks may be replaced while at
most as many tasks as the budget are replaced at once (ADR 0132).
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
from control_plane.scheduler.core.assignment import unified, with_wanted_versions
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import (
    Decision,
    DecisionInput,
    DisruptionBudget,
    FoundPlaces,
)
from control_plane.scheduler.core.needed_operations import (
    find_due,
    is_failed_trial,
    is_voluntary,
    needed_operation,
    urgency,
)
from control_plane.scheduler.core.new_tasks import has_crashed, how_it_failed, is_failing
from control_plane.scheduler.core.operations import (
    OperationLedger,
    approval,
    is_acknowledged,
    is_being_removed,
    is_offered,
    last_started_version,
    waits,
)
from control_plane.scheduler.core.owner_moves import is_moved, is_restarted
from control_plane.scheduler.core.reconcile import observe
from control_plane.scheduler.core.release import update_pace, with_rollout, with_rollout_advanced
from control_plane.scheduler.core.rollout import (
    PlacementResult,
    is_moving,
    must_move,
    take_down,
    with_placements,
    without_unused_specs,
)
from control_plane.scheduler.core.rollout_progress import describe_blocked
from control_plane.scheduler.core.sizing import (
    begin_removals,
    with_wanted_size,
    with_withdrawn_removals,
)
from control_plane.scheduler.core.surge import (
    removable_serving,
    with_extra_tasks,
    with_swapped_roles,
)
from control_plane.scheduler.core.task_versions import (
    is_outdated,
    newest_allowed,
    updates_to_newest,
)


def decide(record: JobRecord, inputs: DecisionInput) -> Decision:
    """Return the decision as far as it can be made without the allocator."""
    known = with_rollout(lapsed(record, inputs.now.wall))
    if not is_plain(known):
        known = with_wanted_versions(known, unified(known, inputs))
    decision = Decision(known, OperationLedger(record, inputs.now))
    decision.replace_record(observe(decision.record, inputs.view, inputs.now))
    decision.record = with_rollout_advanced(decision.record, record, decision.ledger, inputs.now)
    decision.record = _end_failed_canary(decision.record, record, decision.ledger, inputs.now)
    decision.record = with_withdrawn_removals(decision)
    decision.replace_record(with_wanted_size(decision, inputs))
    decision.replace_record(with_extra_tasks(decision, inputs))
    decision.record = without_unused_specs(decision.record)
    decision.detail = describe_blocked(decision.record, inputs.now)
    decision.record = with_answer(
        decision.record, inputs.view, inputs.answer, decision.ledger, inputs.now
    )
    has_extras = any(task.extra for task in decision.record.tasks)
    may_go = removable_serving(decision.record, inputs.view) if has_extras else 0
    decision.record = begin_removals(decision, inputs, may_go)
    _propose(decision, inputs)
    if decision.waits_for_surge:
        decision.detail = "it waits for its turn: other jobs use all extra tasks of the entitlement"
    return decision


def begin_operations(decision: Decision, places: FoundPlaces, inputs: DecisionInput) -> None:
    """Begin, in the decision, the operations that may begin now."""
    tasks, generation = list[TaskRecord](), decision.record.generation
    asks, overdue = is_controlled(decision.record), frozenset(decision.overdue)
    chosen = frozenset(decision.chosen)
    ready = chosen & places.ready
    stopping = (
        frozenset[int]() if asks else _may_restart_in_place(decision, places.without_room, inputs)
    )
    going = _stopping_now(decision, ready | stopping, inputs, asks=asks) | overdue
    for task in decision.record.tasks:
        asked = task.index in ready or (
            asks and task.index in chosen and _may_be_asked_without_room(task)
        )
        if asked and task.index not in going:
            task = _offered(decision.ledger, task)
        elif task.index in going:
            generation += 1
            approved = approval(task, asks=asks, forced=task.index in overdue)
            instead = {"instead": STOP} if task.index in stopping - overdue else {}
            task = decision.ledger.with_state(
                task, OperationState.RUNNING, approved=approved, **instead
            )
            task = take_down(task, generation, inputs.now)
        tasks.append(task)
    record = replace(decision.record, tasks=tasks, generation=generation)
    record = with_swapped_roles(record, inputs.view, places.without_room - going)
    decision.record = replace(record, operations=decision.ledger.opened)
    waiting = sum(1 for task in tasks if is_offered(task)) if asks else 0
    if waiting and decision.record.spec.controller is not None:
        name, s = decision.record.spec.controller.name, "" if waiting == 1 else "s"
        decision.detail = (
            decision.detail or f"{waiting} operation{s} wait for the controller {name}"
        )
    decision.detail = places.detail or decision.detail


def settle(decision: Decision, placed: PlacementResult, now: Moment) -> None:
    """Add the allocator's placements to the decision."""
    decision.replace_record(with_placements(decision.record, placed, now))


def _end_failed_canary(
    record: JobRecord, before: JobRecord, ledger: OperationLedger, now: Moment
) -> JobRecord:
    """Return the record without the canary if one of its tasks failed since `before` (JC8).

    Its tasks go back as soon as the intents are composed again. A hold has priority.
    """
    canary = canary_of(record)
    if canary is None or is_held(record):
        return record
    earlier = {task.index: task for task in before.tasks} if before is not record else {}
    for task in record.tasks:
        if task.version != canary.version or is_being_removed(task):
            continue
        if is_failing(task, record, now) or has_crashed(earlier.get(task.index), task):
            why = how_it_failed(task) or "it ended, and its agent started it again"
            reason = f"the canary ended: it failed on {record.name}-{task.index} ({why})"
            ledger.add_rollout_event(reason, OperationState.FAILED)
            writer = record.intents[Dimension.CANARY].writer
            return written(record, Dimension.CANARY, None, writer, now.wall, reason=reason[:512])
    return record


# -- proposing


def _propose(decision: Decision, inputs: DecisionInput) -> None:
    """Choose the operations that the budget allows now, and propose them."""
    record = decision.record
    staying = [task for task in record.tasks if not (record.stopping or is_being_removed(task))]
    found = find_due(decision, staying, inputs)
    serving, due, overdue = found.serving, found.due, found.overdue
    if not (due or decision.held or any(task.operation is not None for task in record.tasks)):
        return  # the common case
    serving -= overdue  # they leave now regardless of the budget, and reduce what is left of it
    decision.serving, decision.overdue = frozenset(serving), tuple(sorted(overdue))
    decision.chosen = _choose(
        decision, staying, {i: t for i, t in due.items() if i not in overdue}, inputs
    )
    decision.moving = frozenset(
        i
        for i in decision.chosen
        if must_move(due[i], inputs.view) or i in found.repairs or is_moved(due[i])
    )
    picked = overdue | set(decision.chosen)
    if picked or any(task.operation is not None for task in record.tasks):
        tasks = [_with_proposal(decision, task, due, picked, inputs) for task in record.tasks]
        decision.record = replace(record, tasks=tasks, operations=decision.ledger.opened)
    has_healthy = any(index in serving for index in due)
    if (
        has_healthy
        and decision.budget.serving <= 0
        and not any(is_moving(task) for task in staying)
    ):
        decision.detail = _describe_used_budget(record, staying, serving)
    if decision.held and not picked:
        decision.detail = decision.detail or next(iter(inputs.held_back.values()), "")


def _choose(
    decision: Decision,
    staying: Sequence[TaskRecord],
    due: Mapping[int, TaskRecord],
    inputs: DecisionInput,
) -> tuple[int, ...]:
    """Return the due tasks whose operations may begin within the budget, most urgent first."""
    record = decision.record
    first = sorted(
        due.values(), key=lambda t: (not is_failed_trial(t, record), *urgency(t, inputs))
    )
    broken = [task.index for task in first if task.index not in decision.serving]
    healthy = [task.index for task in first if task.index in decision.serving]
    decision.budget = _remaining_budget(decision, staying, broken, inputs)
    unpaced = {i for i, t in due.items() if must_move(t, inputs.view) or is_moved(t)}
    unpaced |= {i for i, t in due.items() if is_failed_trial(t, record)}
    renewed = {
        i
        for i, t in due.items()
        if i not in unpaced and is_outdated(t, record) and updates_to_newest(t, record)
    }
    room, chosen = replaced(decision.budget), list[int]()
    if is_controlled(record):  # the controller chooses among all of them
        room.serving = room.broken = OFFERED_MAX
        room.paced = None
    for index in broken + healthy:
        if room.take(serves=index in decision.serving, updates=index in renewed):
            chosen.append(index)
    return tuple(chosen[:OFFERED_MAX])


def _remaining_budget(
    decision: Decision, staying: Sequence[TaskRecord], broken: Sequence[int], inputs: DecisionInput
) -> DisruptionBudget:
    """Return how many tasks may be taken down now, by the budget and by the pace of the update."""
    record = decision.record
    base = [task.index for task in staying if not task.extra]
    standing_in = sum(1 for task in staying if task.extra and task.index in decision.serving)
    most = record.spec.update.max_unavailable + standing_in
    down = sum(1 for index in base if index not in decision.serving)
    replaced_soon = len(frozenset(broken) & frozenset(base))
    fresh, batch = update_pace(record, inputs.now)
    paced = None
    if fresh or batch is not None:
        paced = max(0, most - down - fresh)
        paced = paced if batch is None else min(paced, batch)
    return DisruptionBudget(most - down, most - down + replaced_soon, newest_allowed(record), paced)


def _describe_used_budget(
    record: JobRecord, staying: Sequence[TaskRecord], serving: set[int]
) -> str:
    base = [task for task in staying if not task.extra]
    down = sum(1 for task in base if task.index not in serving)
    most = record.spec.update.max_unavailable
    if most == 0:
        waiting = [task.reason for task in staying if task.extra and task.reason]
        return "; ".join(["the update waits for an extra task", *waiting[:1]])
    return (
        f"{down} of {len(base)} tasks are unavailable and at most {most} may be; the update waits"
    )


def _with_proposal(
    decision: Decision,
    task: TaskRecord,
    due: Mapping[int, TaskRecord],
    picked: set[int],
    inputs: DecisionInput,
) -> TaskRecord:
    """Return a task with the operation that it needs, and without one that it does not."""
    known = task.operation
    if known is None and task.index not in picked:
        return task
    kind, cause, reason, deadline = needed_operation(decision.record, task, inputs)
    ran = last_started_version(task)
    if known is not None and waits(task) and is_voluntary(known):
        # an operation stays needed while its machine does not answer for a moment
        is_needed = (
            task.index in due
            or is_outdated(task, decision.record)
            or must_move(task, inputs.view)
            or is_moved(task)
            or is_restarted(task)
        )
        if is_needed and known.kind is kind:
            if kind is not OperationKind.UPDATE or (known.cause, known.reason) == (cause, reason):
                return task
            return replace(task, operation=replace(known, cause=cause, reason=reason, ran=ran))
        task = decision.ledger.close(task, OperationState.WITHDRAWN, "it is no longer needed")
    if task.index not in picked:
        return task
    if task.operation is not None:
        task = decision.ledger.close(
            task, OperationState.WITHDRAWN, "a later operation replaces it"
        )
    return decision.ledger.open(task, kind, cause, reason, OperationState.PROPOSED, deadline, ran)


# -- beginning


def _stopping_now(
    decision: Decision, ready: frozenset[int], inputs: DecisionInput, *, asks: bool
) -> frozenset[int]:
    """Return the tasks that are taken down now: acknowledged ones, as the budget allows."""
    known = {task.index: task for task in decision.record.tasks}
    going = set[int]()
    for index in decision.chosen:
        task = known[index]
        updates = task.operation is not None and task.operation.kind is OperationKind.UPDATE
        updates = updates and updates_to_newest(task, decision.record)
        is_capped = task.operation is not None and task.operation.cause is Cause.POWER
        if is_capped and inputs.capped_moves is not None and decision.capped >= inputs.capped_moves:
            continue
        if not (index in ready or _restarts_in_place(task)) or (asks and not is_acknowledged(task)):
            continue
        if decision.budget.take(serves=index in decision.serving, updates=updates):
            decision.capped += is_capped
            going.add(index)
    return frozenset(going)


def _may_restart_in_place(
    decision: Decision, without_room: frozenset[int], inputs: DecisionInput
) -> frozenset[int]:
    """Return which tasks may stop for a switch of host profile and restart on the same machine.

    No other machine has room for them. A switch has no deadline: tasks and machine would wait
    forever (BUG-CP53). It takes as long as a boot, so the budget decides.
    """
    return frozenset(
        task.index
        for task in decision.record.tasks
        if task.index in without_room
        and task.operation is not None
        and task.operation.cause is Cause.PROFILE
        and task.placement is not None
        and (machine := inputs.view.get(task.placement.machine)) is not None
        and machine.returning
    )


def _may_be_asked_without_room(task: TaskRecord) -> bool:
    """Return whether the controller is asked although there may be no room for a move.

    It may choose an alternative to the move.
    """
    return task.operation is not None and task.operation.cause in MUST_LEAVE


def _restarts_in_place(task: TaskRecord) -> bool:
    """Return whether a task stops and restarts on its machine, so that it needs no other place."""
    return task.operation is not None and task.operation.instead == STOP


def _offered(ledger: OperationLedger, task: TaskRecord) -> TaskRecord:
    """Return the task with its proposed operation offered to the controller."""
    if task.operation is not None and task.operation.state is OperationState.PROPOSED:
        return ledger.with_state(task, OperationState.OFFERED)
    return task
