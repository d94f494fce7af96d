"""Advances a job's rollout to its newest version: canaries, then batches; back if it fails.

    canaries -> the rest, each batch through its gate -> done
       too many new tasks fail -> halted, or back to what the job ran before (a new version)

The budget of `decide.py` always holds: this module only makes an update slower.
Seconds are counted on the monotonic clock, from zero after a start of the control plane.
"""

from __future__ import annotations

from msgspec.structs import replace

from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, TaskRecord
from control_plane.api.operations import OperationKind, OperationState
from control_plane.api.updates import OnFailure, Rollout
from control_plane.job_control.core.intents import is_on_trial, next_end, next_version, pushed
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.job_check import same_tasks
from control_plane.scheduler.core.new_tasks import (
    PLACED,
    has_crashed,
    has_no_room,
    how_it_failed,
    is_away,
    is_failing,
    is_new,
    is_newest_rollout,
    is_outside_rollout,
    is_proven,
    serves,
)
from control_plane.scheduler.core.operations import ENDING, OperationLedger, is_being_removed
from control_plane.scheduler.core.task_versions import canary_count, placement_version

_SELF = "scheduler"
"""The writer of a push that goes back by itself (`on_failure`)."""


def with_rollout(record: JobRecord) -> JobRecord:
    """Return the record with the rollout of its newest version, once tasks run another one.

    A finished rollout is reopened if a lost task is back with an earlier version.
    """
    known = record.rollout
    if known is not None and is_newest_rollout(known, record):
        if not known.done or all(
            is_new(t, record) or is_outside_rollout(t, record) for t in record.tasks
        ):
            return record
        return replace(record, rollout=replace(known, done=False))
    others = [
        t.version
        for t in record.tasks
        if t.version != record.version and not (is_being_removed(t) or t.version in record.trials)
    ]
    if not others and any(t.version in record.trials for t in record.tasks):
        others = [v for v in sorted(record.specs) if v < record.version and v not in record.trials]
        others = others[-1:]  # all tasks are canaries: no task runs the version before
    if not others:
        return record
    if known is None:  # the version before is unknown: assume the one of most tasks
        base = max(sorted(set(others)), key=others.count)
    else:
        base = known.version if known.done else known.base
    needs_canaries = record.spec.update.canary is not None and any(map(serves, record.tasks))
    fresh = Rollout(version=record.version, base=base, passed=not needs_canaries)
    return replace(record, rollout=fresh)


def with_rollout_advanced(
    record: JobRecord, before: JobRecord, ledger: OperationLedger, now: Moment
) -> JobRecord:
    """Return the record with its rollout advanced; `before`: the record before this round."""
    known = record.rollout
    if known is None or known.done or known.version != record.version or record.stopping:
        return record
    rollout = known if known.passed else _with_passed_canaries(record, known, ledger, now)
    if record.spec.update.on_failure is not OnFailure.CONTINUE and not known.returns_from:
        rollout = _with_failures(record, rollout, before, now)
        failed = _is_failed(record, rollout) or _is_stuck(record, rollout, now)
        if failed and not (record.paused or rollout.halted):
            return _rolled_back_or_halted(record, rollout, ledger, now)
    if rollout.passed and not rollout.halted and _is_done(record, rollout, now):
        rollout = replace(rollout, done=True)
        ledger.add_rollout_event(f"all tasks run version {record.version}", OperationState.DONE)
    return record if rollout is known else replace(record, rollout=rollout)


def update_pace(record: JobRecord, now: Moment) -> tuple[int, int | None]:
    """Return how many serving new tasks have not passed the gate, and the size of the next batch.

    The size is 0 while a batch is under way; None: as many tasks as the budget allows.
    """
    policy = record.spec.update
    if policy.health_gate_s <= 0 and policy.batch is None:
        return 0, None
    new = [task for task in record.tasks if is_new(task, record) and not has_no_room(task)]
    fresh = sum(1 for t in new if serves(t) and not is_proven(t, record, now))
    if policy.batch is None:
        return fresh, None
    under_way = any(not is_proven(task, record, now) for task in new)
    return fresh, 0 if under_way else policy.batch


def restored_spec(now: JobSpec, then: JobSpec) -> JobSpec:
    """Return an earlier version's specification with the present size, pace and placement."""
    return replace(
        then,
        tasks=now.tasks,
        update=now.update,
        preferences=now.preferences,
        admission=now.admission,
        machine_types=now.machine_types,
        requires=now.requires,
        controller=now.controller,
        autoscale=now.autoscale,
    )


def with_restored_version(record: JobRecord, spec: JobSpec, reason: str) -> JobRecord:
    """Return the record with an earlier `spec` as a new version; tasks that run it get its number.

    It is known to work, so it has no canaries, and no rollback.
    """
    version = next_version(record)
    same = {v for v, known in record.specs.items() if same_tasks(known, spec)}
    tasks = [
        replace(task, version=version) if task.version in same else task for task in record.tasks
    ]
    rollout = Rollout(
        version=version,
        base=min(same, default=0),
        passed=True,
        returns_from=record.version,
        reason=reason,
    )
    return replace(with_version(record, spec), tasks=tasks, rollout=rollout)


def with_version(record: JobRecord, spec: JobSpec) -> JobRecord:
    """Return the record with a specification as its new version."""
    version = next_version(record)
    return replace(record, spec=spec, version=version, specs=record.specs | {version: spec})


def resumed(record: JobRecord) -> JobRecord:
    """Return the record with a halted update resumed; its failures so far are forgiven."""
    rollout = record.rollout
    if rollout is None or not rollout.halted:
        return record
    return replace(
        record,
        rollout=replace(rollout, halted=False, forgiven=len(rollout.failed), reason=""),
    )


def next_round_at(record: JobRecord, now: Moment) -> float | None:
    """Return when (steady) the next task passes its gate or is late, or an intent ends."""
    looks, end = [_next_gate_at(record, now)], next_end(record)
    if end is not None:
        looks.append(now.steady + max(0.0, end - now.wall))
    return min((look for look in looks if look is not None), default=None)


def _next_gate_at(record: JobRecord, now: Moment) -> float | None:
    rollout, policy = record.rollout, record.spec.update
    if rollout is None or rollout.done or rollout.halted or not is_newest_rollout(rollout, record):
        return None
    hold_s = policy.canary.hold_s if policy.canary is not None and not rollout.passed else 0.0
    gate_s, times = max(policy.health_gate_s, hold_s), list[float]()
    for task in record.tasks:
        if task.version != record.version or task.phase not in PLACED:
            continue
        spent_s = now.spent_s(task)
        for after_s in (
            (policy.health_gate_s, gate_s) if serves(task) else (policy.healthy_within_s,)
        ):
            if spent_s < after_s:
                times.append(now.steady + after_s - spent_s)
    return min(times, default=None)


# -- the stages


def _with_passed_canaries(
    record: JobRecord, rollout: Rollout, ledger: OperationLedger, now: Moment
) -> Rollout:
    """Return the rollout, with the canaries passed if they were healthy for their `hold_s`."""
    canary, wanted = record.spec.update.canary, canary_count(record)
    if canary is None or not record.spec.tasks:
        return replace(rollout, passed=True)
    if not wanted:
        return rollout  # the version is not pushed to any task yet
    new = [t for t in record.tasks if is_new(t, record) and not has_no_room(t)]
    hold_s = max(canary.hold_s, record.spec.update.health_gate_s)
    held = [task for task in new if serves(task) and now.spent_s(task) >= hold_s]
    if len(held) < wanted or len(held) < len(new):
        return rollout
    ledger.add_rollout_event(
        f"{len(held)} canaries of version {record.version} stayed healthy", OperationState.DONE
    )
    return replace(rollout, passed=True)


def _with_failures(record: JobRecord, rollout: Rollout, before: JobRecord, now: Moment) -> Rollout:
    """Return the rollout with the new tasks that have failed so far."""
    known = set(rollout.failed)
    earlier = {task.index: task for task in before.tasks} if before is not record else {}
    found = [
        task.index
        for task in record.tasks
        if task.index not in known
        and not is_being_removed(task)
        and task.version == record.version
        and (is_failing(task, record, now) or has_crashed(earlier.get(task.index), task))
    ]
    if not found:
        return rollout
    room = record.spec.update.failures + rollout.forgiven
    return replace(rollout, failed=(*rollout.failed, *found)[: max(len(known), room)])


def _failures_needed(record: JobRecord, rollout: Rollout) -> int:
    """Return how many new tasks have to fail before the update counts as failed.

    At most as many tasks as can be new and broken at once: else the update would wait forever.
    """
    policy = record.spec.update
    most = max(1, policy.max_unavailable + policy.surge)
    if not rollout.passed:
        most = min(most, max(1, canary_count(record)))
    return max(1, min(policy.failures, most, policy.batch or most, record.spec.tasks))


def _is_failed(record: JobRecord, rollout: Rollout) -> bool:
    return len(rollout.failed) - rollout.forgiven >= _failures_needed(record, rollout)


def _is_stuck(record: JobRecord, rollout: Rollout, now: Moment) -> bool:
    """Return whether a new task keeps failing, and no other new task is still being tested.

    A broken task can block further updates (its batch, the canaries, a controller). Then the update
    would wait forever for the number of failures that the owner set.
    """
    blamed, fails = frozenset(rollout.failed[rollout.forgiven :]), False
    for task in record.tasks:
        if not is_new(task, record) or is_proven(task, record, now):
            continue
        if task.index not in rollout.failed:
            if task.phase is TaskPhase.PENDING and task.reason:
                continue  # no machine has room for it
            return False
        if task.index in blamed and is_failing(task, record, now):
            operation = task.operation  # none is left on one that served
            bad_s = now.spent_s(task) if operation is None else now.wall - operation.since
            fails |= bad_s >= record.spec.update.healthy_within_s
    return fails


def _rolled_back_or_halted(
    record: JobRecord, rollout: Rollout, ledger: OperationLedger, now: Moment
) -> JobRecord:
    """Return the record after too many new tasks failed: rolled back if possible, else halted.

    A rollback is not judged itself, so versions do not alternate.
    """
    count, named = len(rollout.failed), f"{record.name}-{rollout.failed[-1]}"
    words = next((how_it_failed(t) for t in record.tasks if t.index == rollout.failed[-1]), "")
    why = f" ({words})" if words else ""
    reason = f"version {record.version} failed on {count} task{('s' if count > 1 else '')},"
    reason += f" recently on {named}{why}"
    base = record.specs.get(rollout.base)
    halts = record.spec.update.on_failure is not OnFailure.ROLLBACK
    if base is None or halts or same_tasks(base, record.spec):
        ledger.add_rollout_event(f"halted: {reason}", OperationState.FAILED)
        return replace(record, rollout=replace(rollout, halted=True, reason=reason))
    ledger.add_rollout_event(
        f"rolled back to version {rollout.base}: {reason}", OperationState.FAILED
    )
    reason = f"{reason}; the job was rolled back to version {rollout.base}"
    return pushed(
        with_restored_version(record, restored_spec(record.spec, base), reason),
        _SELF,
        now.wall,
        reason=reason,
    )


def _is_done(record: JobRecord, rollout: Rollout, now: Moment) -> bool:
    """Return whether all tasks have the newest version, and at least one has passed its gate.

    Tasks without a machine do not count as passed.
    """
    failed = frozenset(rollout.failed)
    some_proven = any(is_proven(task, record, now) for task in record.tasks)
    return all(
        is_being_removed(task)
        or is_on_trial(record, task)
        or (some_proven and is_away(task) and placement_version(record, task) == record.version)
        or (
            task.version == record.version
            and not _is_in_update(task)
            and (
                (some_proven and task.phase not in PLACED)
                or task.index in failed
                or is_proven(task, record, now)
            )
        )
        for task in record.tasks
    )


def _is_in_update(task: TaskRecord) -> bool:
    """Return whether a task is between its old and new version; one without room is not."""
    operation = task.operation
    if operation is None or operation.kind is not OperationKind.UPDATE:
        return False
    if operation.state is not OperationState.RUNNING:
        return False
    return task.phase in ENDING or (task.phase is TaskPhase.PENDING and not task.reason)
