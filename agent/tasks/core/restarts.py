"""What follows the end of a task: its restart policy and the back-off before the next start."""

from __future__ import annotations

import hashlib

from msgspec.structs import replace

from agent.api import Exit, Health, RestartWhen, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord, Wanted
from agent.tasks.core.exits import describe

LONG_RUN_S = 600.0
"""The back-off of a task that ran at least this long before it ended begins again at its shortest
(RestartPolicy)."""
LEAST_MAX_S = 1.0
"""Least value of the longest pause. A task that keeps ending must not occupy its host: each start
makes systemd load a unit, and each end writes to the disk."""
EVICTED = "evicted"
"""Result of the end of a task that the host ended because it needed its memory."""
_JITTER = 0.25
"""Share of a pause that differs between tasks, so that tasks that ended together do not start
together."""


def after_end(task: TaskRecord, end: Exit, now: LeaseMoment) -> TaskRecord:
    """Return the task after an end that was not requested, according to its restart policy."""
    ran_s = _ran_s(task, end, now)
    policy = task.spec.restart
    again = policy.when is RestartWhen.ALWAYS or (
        policy.when is RestartWhen.ON_FAILURE and end.result != "success"
    )
    ended = replace(
        task,
        last_exit=end,
        ended_invocation=task.invocation_id,
        health=Health.UNKNOWN,
        reason=describe(
            end,
            ran_s=ran_s,
            max_run_s=task.spec.life.max_run_s,
            started=task.started_boot_s is not None,
        ),
    )
    if not again:
        return replace(ended, state=TaskState.STOPPED, next_start_at=None, next_start_boot_s=None)
    waiting = _in_backoff(ended, 0 if ran_s >= LONG_RUN_S else task.streak, now)
    return replace(waiting, restarts=task.restarts + 1)


def _in_backoff(task: TaskRecord, streak: int, now: LeaseMoment) -> TaskRecord:
    """Return the task in back-off after `streak` restarts in a row."""
    pause_s = backoff_s(task, streak)
    return replace(
        task,
        state=TaskState.BACKOFF,
        streak=streak + 1,
        next_start_at=now.wall + pause_s,
        next_start_boot_s=now.boot_s + pause_s,
    )


def _ran_s(task: TaskRecord, end: Exit, now: LeaseMoment) -> float:
    """Return how long the task ran; by systemd's timestamps if the agent did not see it running."""
    if task.started_boot_s is not None:
        return now.boot_s - task.started_boot_s
    return end.at - task.started_at if task.started_at else 0.0


def backoff_s(task: TaskRecord, streak: int) -> float:
    """Return the pause before the next start: doubled with each restart, up to the longest.

    It is shortened by up to a quarter (`_JITTER`), by an amount that depends on task and start.
    """
    policy = task.spec.restart
    longest_s = max(policy.backoff_max_s, LEAST_MAX_S)
    pause_s = min(policy.backoff_s * 2.0 ** min(streak, 30), longest_s)
    name = f"{task.task_id}/{task.restarts}/{streak}".encode()
    share = int(hashlib.sha256(name).hexdigest()[:8], 16) / 0xFFFFFFFF
    return pause_s * (1.0 - _JITTER * share)


def after_failure(task: TaskRecord, reason: str, now: LeaseMoment, *, retry: bool) -> TaskRecord:
    """Return the task after a step towards its start failed.

    With `retry` it waits as after an end; without it only a new request starts the task.
    """
    failed = replace(task, reason=reason)
    if retry:
        return _in_backoff(failed, task.streak, now)
    return replace(failed, state=TaskState.FAILED, next_start_at=None, next_start_boot_s=None)


def evicted(task: TaskRecord, why: str, now: LeaseMoment) -> TaskRecord:
    """Return the task after its eviction, according to its restart policy; itself if not running.

    The next decision stops the processes that still run.
    """
    if task.state is not TaskState.RUNNING or task.wanted is not Wanted.RUN:
        return task
    return replace(after_end(task, Exit(result=EVICTED, at=now.wall), now), reason=why)
