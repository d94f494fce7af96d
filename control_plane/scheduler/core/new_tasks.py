"""Judges the tasks of a job's newest version: which are new, proven or failing."""

from __future__ import annotations

from agent.api import Health, RestartWhen, TaskState, exit_text
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, spec_of
from control_plane.api.updates import Rollout
from control_plane.job_control.core.intents import is_on_trial, on_its_way_to
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import is_being_removed

TROUBLE = (TaskState.BACKOFF, TaskState.FAILED, TaskState.STOPPED)
_BLAMELESS = ("lost", "cut-off")
"""Results that the version did not cause: the machine was rebooted, or cut off."""
PLACED = (TaskPhase.STARTING, TaskPhase.RUNNING)


def is_newest_rollout(rollout: Rollout, record: JobRecord) -> bool:
    """Return whether a rollout is that of the newest version."""
    return rollout.version == record.version


def is_new(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task runs the newest version, or is being updated to it.

    A task that an earlier update started, with a version that is no longer the newest, is not.
    """
    return not is_being_removed(task) and on_its_way_to(record, task) == record.version


def has_no_room(task: TaskRecord) -> bool:
    """Return whether an extra task found no place; a rollout continues without it (BUG-CP59)."""
    return task.extra and task.phase is TaskPhase.PENDING and task.reason != ""


def serves(task: TaskRecord) -> bool:
    """Return whether a task runs and clients may call it."""
    return task.phase is TaskPhase.RUNNING and task.listed


def is_away(task: TaskRecord) -> bool:
    """Return whether a task does not matter to a rollout: it is lost, or being removed."""
    return task.phase is TaskPhase.LOST or is_being_removed(task)


def is_outside_rollout(task: TaskRecord, record: JobRecord) -> bool:
    """Return whether a task does not matter to the rollout of the newest version."""
    return is_away(task) or is_on_trial(record, task)


def is_proven(task: TaskRecord, record: JobRecord, now: Moment) -> bool:
    """Return whether a task has been healthy for the time that the gate requires."""
    gate_s = record.spec.update.health_gate_s
    return serves(task) and task.version == record.version and now.spent_s(task) >= gate_s


def is_failing(task: TaskRecord, record: JobRecord, now: Moment) -> bool:
    """Return whether a new task is unhealthy, failed or late, and its machine is not the cause."""
    if task.phase not in PLACED or task.placement is None:
        return False
    if task.health is Health.UNHEALTHY:
        return True
    if task.state in TROUBLE:
        result = task.last_exit.result if task.last_exit is not None else ""
        when = spec_of(record, task).restart.when
        finished = result == "success" and when is not RestartWhen.ALWAYS
        ended = task.state is TaskState.STOPPED and when is RestartWhen.NEVER
        return result not in _BLAMELESS and not finished and not ended
    late = now.spent_s(task) >= record.spec.update.healthy_within_s
    begins = task.state not in (None, TaskState.STOPPING)  # a stopping task is not a late start
    return late and task.phase is TaskPhase.STARTING and begins


def has_crashed(old: TaskRecord | None, task: TaskRecord) -> bool:
    """Return whether a task ended and its agent restarted it between two rounds."""
    return (
        old is not None
        and old.generation == task.generation
        and old.invocation_id != ""
        and task.restarts > old.restarts
    )


def how_it_failed(task: TaskRecord) -> str:
    """Return the reason of a failed task, and how its last run ended."""
    end = exit_text(task.last_exit) if task.last_exit is not None else ""
    return task.reason if end in task.reason else ", ".join(filter(None, (task.reason, end)))
