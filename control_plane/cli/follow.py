"""Waiting for a job and watching it: polls, tolerates a front end that restarts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from control_plane.api.jobs import JobPhase, JobStatus
from control_plane.cli.show import progress
from wire.errors import NotFound, TwineError, Unreachable

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

POLL_S = 0.5
MAX_REASONS = 5


class NotReached(TwineError):
    """A job did not get where it should within the time it was given."""

    code = "not_reached"


def arrived(status: JobStatus) -> bool:
    """Return whether a job is what its owner wants: all tasks healthy, on the newest version."""
    return (
        status.phase is JobPhase.STABLE
        and status.healthy >= status.wanted
        and status.updated >= status.wanted
    )


def went_back(status: JobStatus, first: int) -> NotReached | None:
    """Return the failure of the version `first` that was waited for, if it failed."""
    rollout = status.record.rollout
    if rollout is None or not (rollout.halted or rollout.returns_from == first):
        return None
    return NotReached(
        f"job {status.record.name}: {status.update or rollout.reason}",
        hint=f"twinectl job events {status.record.name}, twinectl job logs",
    )


def summary(status: JobStatus) -> str:
    """Return how a job does in a few words."""
    return (
        f"{status.phase.value}, {status.healthy}/{status.wanted} healthy, "
        f"{status.updated} on version {status.record.version}"
    )


def headline(status: JobStatus) -> str:
    """Return a job in one line, with what holds it up."""
    line = f"job {status.record.name}: {summary(status)}"
    return f"{line}; {status.detail}" if status.detail else line


def reasons(status: JobStatus) -> list[str]:
    """Return why tasks are not running, the most frequent reasons first."""
    found = Counter(t.reason for t in status.record.tasks if t.reason)
    return [f"{count} task(s): {reason}" for reason, count in found.most_common(MAX_REASONS)]


async def changes(client: ControlPlaneClient, name: str) -> AsyncIterator[JobStatus | None]:
    """Yield a job each time it looks different; None once it is gone."""
    last: JobStatus | None = None
    while True:
        try:
            status = await client.get_job(name)
        except Unreachable as e:
            progress(f"front end unreachable, still trying: {e}")
            await asyncio.sleep(2 * POLL_S)
            continue
        except NotFound:
            if last is None:
                raise
            yield None
            return
        if status != last:
            last = status
            yield status
        await asyncio.sleep(POLL_S)


async def wait_stable(client: ControlPlaneClient, name: str, timeout_s: float) -> JobStatus:
    """Return the job once it is what its owner wants; say on stderr how it gets there."""
    said, status, first = "", None, 0
    try:
        async with asyncio.timeout(timeout_s):
            async for status in changes(client, name):
                if status is None:
                    raise NotFound(f"job {name} was stopped while waiting for it")
                first = first or status.record.version
                if (line := headline(status)) != said:
                    progress(line)
                    said = line
                if (failed := went_back(status, first)) is not None:
                    raise failed
                if arrived(status):
                    return status
    except TimeoutError:
        pass
    raise _not_reached(name, "is not stable", status, timeout_s)


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
    raise _not_reached(name, "still has tasks", status, timeout_s)


def _not_reached(name: str, what: str, status: JobStatus | None, timeout_s: float) -> NotReached:
    if status is None:
        why = ["the front end did not answer"]
    else:
        why = [summary(status), *(reasons(status) or [status.detail])]
    return NotReached(
        f"job {name} {what} after {timeout_s:.0f} s: {'; '.join(filter(None, why))}",
        hint=f"it goes on; look again with `twinectl job status {name} --watch`",
    )
