"""Describes the progress of an update to the owner of the job."""

from __future__ import annotations

from control_plane.api.jobs import JobRecord
from control_plane.api.updates import Rollout
from control_plane.job_control.core.intents import push_of, stable_of, waits_for_hold
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.new_tasks import is_new, is_newest_rollout, serves
from control_plane.scheduler.core.operations import is_being_removed
from control_plane.scheduler.core.rollout import UNPLACED
from control_plane.scheduler.core.task_versions import canary_count, is_in_entitlement
from wire.errors import some_of


def describe_progress(record: JobRecord, now: Moment) -> str:
    """Describe the progress or result of an update; empty: there is nothing to report."""
    rollout = record.rollout
    if rollout is None or not is_newest_rollout(rollout, record) or record.stopping:
        return ""
    if rollout.halted:
        return f"{rollout.reason}; the update stays until it is resumed or rolled back"
    if rollout.returns_from:
        return rollout.reason if rollout.reason else ""
    if rollout.done:
        return ""
    words = [
        _describe_canaries(record, rollout, now),
        _describe_unplaced(record, rollout),
        _describe_transfer(record, rollout),
        _describe_share(record),
    ]
    return "; ".join(filter(None, words))


def postponed(record: JobRecord) -> str:
    """Describe the change that a pause or a hold postpones; empty: it postpones none."""
    if record.paused and any(task.version != record.version for task in record.tasks):
        return f"the update to version {record.version} is paused"
    return waits_for_hold(record)


def describe_blocked(record: JobRecord, now: Moment) -> str:
    """Describe why an update waits for an action of its owner; empty: it does not.

    This needs only the record, so the response to a change contains it before the job's next round.
    """
    paused, rollout = postponed(record), record.rollout
    if record.paused and paused:
        return paused
    halted = describe_progress(record, now) if rollout is not None and rollout.halted else ""
    return halted or paused


def _describe_share(record: JobRecord) -> str:
    push = push_of(record)
    if push.is_whole or not stable_of(record):
        return ""
    run = sum(
        1 for task in record.tasks if task.version == record.version and not is_being_removed(task)
    )
    most = push.of(record.spec.tasks)
    return (
        f"version {record.version} is pushed to {most} of {record.spec.tasks} tasks; {run} run it"
    )


def _describe_transfer(record: JobRecord, rollout: Rollout) -> str:
    base = record.specs.get(rollout.base)
    if base is None or base.entitlement == record.spec.entitlement:
        return ""
    moved = sum(
        1 for task in record.tasks if is_in_entitlement(record, task.version) and serves(task)
    )
    return (
        f"the job moves from entitlement {base.entitlement} to {record.spec.entitlement}:"
        f" {moved} of {record.spec.tasks} tasks serve there"
    )


def _describe_unplaced(record: JobRecord, rollout: Rollout) -> str:
    """Describe the new tasks without a machine that a stage waits for; empty: it waits for none."""
    if rollout.passed and record.spec.update.batch is None:
        return ""
    waits = [
        task.index
        for task in record.tasks
        if is_new(task, record) and not task.extra and task.phase in UNPLACED and task.reason
    ]
    if not waits:
        return ""
    stage = "batch" if rollout.passed else "canaries"
    return f"the {stage} wait{'s' if rollout.passed else ''} until {_named(waits)} a machine"


def _named(indexes: list[int]) -> str:
    named = some_of(indexes)
    return f"task {named} has" if len(indexes) == 1 else f"tasks {named} have"


def _describe_canaries(record: JobRecord, rollout: Rollout, now: Moment) -> str:
    if not rollout.passed and record.spec.update.canary is not None:
        new = [task for task in record.tasks if is_new(task, record)]
        held_s = min((now.spent_s(task) if serves(task) else 0.0 for task in new), default=0.0)
        hold_s = record.spec.update.canary.hold_s
        return (
            f"version {record.version}: {len(new)} of {canary_count(record)} canaries, healthy for "
            f"{held_s:.0f} of {hold_s:.0f} s"
        )
    return ""
