"""Follows the endpoints of jobs with one long-polling call, and keeps the last known ones.

A job is followed from the first request of a client until `IDLE_S` after the last one. While the
control plane is unreachable, its last answer stays in force: tasks outlive the control plane (P1),
so most of the listed tasks still serve.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from control_plane.api.endpoints import Endpoints
from control_plane.api.watch import MAX_JOBS_WATCHED, EndpointChanges
from wire.errors import Busy, TwineError

log = logging.getLogger(__name__)

Watch = Callable[[Mapping[str, int | None], float], Awaitable[EndpointChanges]]
"""`ControlPlaneClient.watch_endpoints`."""

WAIT_S = 30.0
IDLE_S = 600.0
"""Seconds without a client's request after which a job is no longer followed."""
_RETRY_FIRST_S, _RETRY_MAX_S = 0.2, 5.0


@dataclass(slots=True)
class _FollowedJob:
    """The known addresses of one job."""

    requested_at: float
    revision: int | None = None
    """0: there is no such job; None: unknown."""
    endpoints: Endpoints | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)


class EndpointFollower:
    """Returns the known addresses of jobs at once; the first request for a job follows it."""

    def __init__(self, watch: Watch, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called after each change of addresses."""
        self._watch = watch
        self._changed = changed
        self._jobs: dict[str, _FollowedJob] = {}
        self._call: asyncio.Task[EndpointChanges] | None = None
        self._is_waiting = False
        """Whether the pending call waits for changes. A call with an unknown job is answered at
        once; it must not be cancelled, or a flood of new names would keep it from its answer."""
        self._has_jobs = asyncio.Event()
        self.failing = ""
        """Why the control plane does not answer; empty while it answers."""

    async def get(self, job: str, wait_s: float = 0.0) -> Endpoints | None:
        """Return the addresses of a job, None if there is no such job.

        Waits up to `wait_s` for the first answer, then raises `Busy`. Also raises `Busy` if more
        jobs are followed than one call allows.
        """
        followed = self._followed_job(job)
        if not followed.known.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await followed.known.wait()
        if followed.revision is None:
            why = self.failing or "no answer yet"
            raise Busy(f"the addresses of job {job!r} are unknown: {why}")
        return followed.endpoints

    def _followed_job(self, job: str) -> _FollowedJob:
        now = asyncio.get_running_loop().time()
        followed = self._jobs.get(job)
        if followed is None:
            self._forget_idle(now)
            self._forget_missing_if_full()
            if len(self._jobs) >= MAX_JOBS_WATCHED:
                raise Busy(
                    f"{MAX_JOBS_WATCHED} jobs, the maximum, are followed already; {job!r} is not"
                )
            followed = self._jobs[job] = _FollowedJob(now)
            self._has_jobs.set()
            if self._call is not None and self._is_waiting:
                self._call.cancel()  # the pending call does not include this job
        followed.requested_at = now
        return followed

    def _forget_idle(self, now: float) -> None:
        for job in [j for j, f in self._jobs.items() if now - f.requested_at > IDLE_S]:
            del self._jobs[job]

    def _forget_missing_if_full(self) -> None:
        """Forget a job that does not exist if the maximum is followed.

        Otherwise questions for invented names would keep clients from the jobs that exist.
        """
        if len(self._jobs) < MAX_JOBS_WATCHED:
            return
        missing = [job for job, followed in self._jobs.items() if followed.revision == 0]
        if missing:
            del self._jobs[min(missing, key=lambda job: self._jobs[job].requested_at)]

    async def run(self) -> None:
        """Follow until cancelled; retry with growing pauses while the control plane fails."""
        retry_s = _RETRY_FIRST_S
        while True:
            if not self._jobs:
                self._has_jobs.clear()
                await self._has_jobs.wait()
            known = {job: followed.revision for job, followed in self._jobs.items()}
            self._is_waiting = None not in known.values()
            self._call = asyncio.ensure_future(self._watch(known, WAIT_S))
            try:
                await asyncio.wait([self._call])
                if self._call.cancelled():
                    continue
                changes = self._call.result()
            except TwineError as e:
                if not self.failing:
                    log.warning("the control plane does not answer", extra={"why": str(e)})
                self.failing = str(e)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
                continue
            finally:
                self._call.cancel()
                self._call = None
            if self.failing:
                log.info("the control plane answers again")
            self.failing, retry_s = "", _RETRY_FIRST_S
            self._apply(changes)
            self._forget_idle(asyncio.get_running_loop().time())

    def _apply(self, changes: EndpointChanges) -> None:
        for endpoints in changes.changed:
            self._update(endpoints.job, endpoints.revision, endpoints)
        for job in changes.missing:
            self._update(job, 0, None)
        if changes.changed or changes.missing:
            self._changed()

    def _update(self, job: str, revision: int, endpoints: Endpoints | None) -> None:
        followed = self._jobs.get(job)
        if followed is not None:
            followed.revision, followed.endpoints = revision, endpoints
            followed.known.set()
