"""Waits for a job and watches it by polling; continues over restarts of the control plane."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import click

from agent.api import exit_text
from control_plane.api.jobs import JobPhase, JobStatus, TaskRecord
from control_plane.api.updates import OnFailure
from control_plane.cli.log_text import lines_of
from control_plane.cli.show import printable, progress
from wire.errors import NotFound, TwineError, Unreachable
from wire.options import seconds

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

timeout_option = click.option(
    "--timeout", type=seconds(), default="10m", show_default=True, help="Time limit of --wait."
)
POLL_S = 0.5
MAX_REASONS = 5
LOG_S = 10.0
"""How long the log of a failed task may take to arrive."""
LINE_MAX = 300
"""Characters of a log line that a failure quotes."""
CRASH_LOOP = 3
"""Restarts of one run of a task during a wait that count as a crash loop."""
CRASH_LOOP_OF_UPDATE = 6
"""The same for an update with its own failure policy, which may halt or roll back first."""


class NotReached(TwineError):
    """A job did not reach the wanted state in the given time."""

    code = "not_reached"
    task: int | None = None
    """The task whose log has the reason."""

    def about_task(self, task: int) -> NotReached:
        """Return this error, with the index of the task that it concerns."""
        self.task = task
        return self


def is_as_wanted(status: JobStatus) -> bool:
    """Return whether a job is as its owner wants: all tasks healthy, on the newest version."""
    return (
        status.phase is JobPhase.STABLE
        and status.healthy >= status.wanted
        and status.updated >= status.wanted
    )


def update_failure(status: JobStatus, first: int) -> NotReached | None:
    """Return the failure of version `first`, for which a command waits; None: it has not failed."""
    rollout = status.record.rollout
    if rollout is None or not (rollout.halted or rollout.returns_from == first):
        return None
    name, index = status.record.name, _failed_last(status)
    return NotReached(
        f"job {name}: {status.update or rollout.reason}",
        hint=f"twinectl job events {name}, twinectl job logs {name} {index} --previous",
    ).about_task(index)


def _failed_last(status: JobStatus) -> int:
    """Return the index of the task that failed last in an update; 0 if that is unknown."""
    rollout = status.record.rollout
    if rollout is None:
        return 0
    if rollout.failed:
        return rollout.failed[-1]
    named = re.search(rf"\b{re.escape(status.record.name)}-(\d+)\b", rollout.reason)
    return int(named[1]) if named is not None else 0


class CrashLoops:
    """Finds tasks of the newest version that crash again and again while a command waits."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], int] = {}
        """Index and generation of a task → its restarts at its first check."""

    def check(self, status: JobStatus) -> NotReached | None:
        """Return the failure if a task is in a crash loop."""
        record = status.record
        limit = CRASH_LOOP_OF_UPDATE if _has_failure_policy(status) else CRASH_LOOP
        for task in record.tasks:
            first = self._first.setdefault((task.index, task.generation), task.restarts)
            if task.version == record.version and task.restarts - first >= limit:
                return _crash_loop(record.name, task)
        return None


def _has_failure_policy(status: JobStatus) -> bool:
    """Return whether a running update halts or rolls back by itself if its tasks fail."""
    rollout = status.record.rollout
    if rollout is None or rollout.done or rollout.returns_from:
        return False
    return status.record.spec.update.on_failure is not OnFailure.CONTINUE


def _crash_loop(job: str, task: TaskRecord) -> NotReached:
    last = f", last with {exit_text(task.last_exit)}" if task.last_exit is not None else ""
    return NotReached(
        f"job {job}: task {job}-{task.index} crashes in a loop: {task.restarts} restarts{last}",
        hint=f"twinectl job logs {job} {task.index} --previous; its restarts continue",
    ).about_task(task.index)


def summary(status: JobStatus) -> str:
    """Return the state of a job in a few words."""
    return (
        f"{status.phase.value}, {status.healthy}/{status.wanted} healthy, "
        f"{status.updated} on version {status.record.version}"
        + (", updates are paused" if status.record.paused else "")
    )


def headline(status: JobStatus) -> str:
    """Return a job in one line, with what delays it."""
    line = f"job {status.record.name}: {summary(status)}"
    return f"{line}; {status.detail}" if status.detail else line


def reasons(status: JobStatus) -> list[str]:
    """Return why tasks are not running, the most frequent reasons first."""
    found = Counter(t.reason for t in status.record.tasks if t.reason)
    return [f"{count} task(s): {reason}" for reason, count in found.most_common(MAX_REASONS)]


async def changes(client: ControlPlaneClient, name: str) -> AsyncIterator[JobStatus | None]:
    """Yield a job each time its state changes; None once it is gone."""
    last: JobStatus | None = None
    while True:
        try:
            status = await client.get_job(name)
        except NotFound:
            if last is None:
                raise
            yield None
            return
        except TwineError as e:
            if not e.retryable:
                raise
            what = "front end unreachable, retrying" if isinstance(e, Unreachable) else "retrying"
            progress(f"{what}: {e}")
            await asyncio.sleep(2 * POLL_S)
            continue
        if status != last:
            last = status
            yield status
        await asyncio.sleep(POLL_S)


async def wait_stable(
    client: ControlPlaneClient, name: str, timeout_s: float, version: int = 0
) -> JobStatus:
    """Return the job once it is as its owner wants; print progress on stderr.

    `version` is the version to wait for; 0: the newest one at the first poll.
    """
    printed, status, first = deque[str](maxlen=4), None, version
    loops = CrashLoops()
    try:
        async with asyncio.timeout(timeout_s):
            async for status in changes(client, name):
                if status is None:
                    raise NotFound(f"job {name} was stopped while waiting for it")
                first = first or status.record.version
                if (line := headline(status)) not in printed:
                    progress(line)
                    printed.append(line)
                if (failed := update_failure(status, first) or loops.check(status)) is not None:
                    raise await _with_last_line(client, name, failed)
                if is_as_wanted(status):
                    return status
    except TimeoutError:
        pass
    raise _timed_out(name, "is not stable", status, timeout_s)


async def _with_last_line(client: ControlPlaneClient, name: str, failed: NotReached) -> NotReached:
    """Return a failure with the task's last output, if that is available (BUG-UX5)."""
    if failed.task is None:
        return failed
    last = ""
    try:
        async with asyncio.timeout(LOG_S):
            chunks = client.job_logs(name, failed.task, tail=1, previous=True)
            async for line in lines_of(chunks):
                last = line or last
    except (TwineError, TimeoutError):
        return failed  # the hint names the log
    if not last:
        return failed
    output = printable(last.rpartition("\t")[2])[:LINE_MAX]
    return NotReached(f"{failed}; last output of {name}-{failed.task}: {output}", hint=failed.hint)


async def wait_gone(client: ControlPlaneClient, name: str, timeout_s: float) -> None:
    """Return once no task of the job is left."""
    status = None
    try:
        async with asyncio.timeout(timeout_s):
            async for status in changes(client, name):
                if status is None:
                    return
                left = len(status.record.tasks)
                progress(f"job {name}: {left} task(s) left to stop")
    except NotFound:
        return
    except TimeoutError:
        pass
    raise _timed_out(name, "still has tasks", status, timeout_s)


def _timed_out(name: str, what: str, status: JobStatus | None, timeout_s: float) -> NotReached:
    if status is None:
        why = ["the front end did not answer"]
    else:
        why = [summary(status), *(reasons(status) or [status.detail])]
    return NotReached(
        f"job {name} {what} after {timeout_s:.0f} s: {'; '.join(filter(None, why))}",
        hint=f"the operation continues; see `twinectl job status {name} --watch`",
    )
