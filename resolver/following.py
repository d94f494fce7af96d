"""Follows the addresses of jobs with one long-polling call, and keeps the last known ones.

A job is followed from the first request of a client until `IDLE_S` after the last one. While the
control plane is unreachable its last answer is used: tasks outlive the control plane (P1), so most
of the listed tasks still serve.
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
class _Followed:
    """The known addresses of one job."""

    asked_at: float
    revision: int | None = None
    """0: there is no such job; None: unknown."""
    endpoints: Endpoints | None = None
    known: asyncio.Event = field(default_factory=asyncio.Event)


class ZoneFollower:
    """Returns the addresses of followed jobs at once; a request begins to follow a job."""

    def __init__(self, watch: Watch, changed: Callable[[], None] = lambda: None) -> None:
        """`changed` is called after each change of addresses."""
        self._watch = watch
        self._changed = changed
        self._jobs: dict[str, _Followed] = {}
        self._news: asyncio.Task[EndpointChanges] | None = None
        self._is_waiting = False
        """Whether the pending request waits for changes. A request with a job whose addresses are
        unknown is answered at once: if each question cancelled it, none would be answered."""
        self._asked = asyncio.Event()
        self.failing = ""
        """Why the control plane does not answer; empty while it answers."""

    async def get(self, job: str, wait_s: float = 0.0) -> Endpoints | None:
        """Return the addresses of a job, None if there is no such job.

        Waits up to `wait_s` for the first answer, then raises `Busy`. Also raises `Busy` if more
        jobs are followed than one call allows.
        """
        found = self._follow(job)
        if not found.known.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await found.known.wait()
        if found.revision is None:
            why = self.failing or "no answer yet"
            raise Busy(f"the addresses of job {job!r} are unknown: {why}")
        return found.endpoints

    def _follow(self, job: str) -> _Followed:
        now = asyncio.get_running_loop().time()
        found = self._jobs.get(job)
        if found is None:
            self._forget_idle(now)
            self._make_room()
            if len(self._jobs) >= MAX_JOBS_WATCHED:
                raise Busy(
                    f"{MAX_JOBS_WATCHED} jobs, the maximum, are followed already; {job!r} is not"
                )
            found = self._jobs[job] = _Followed(now)
            self._asked.set()
            if self._news is not None and self._is_waiting:
                self._news.cancel()  # the pending request does not include this job
        found.asked_at = now
        return found

    def _forget_idle(self, now: float) -> None:
        for job in [j for j, f in self._jobs.items() if now - f.asked_at > IDLE_S]:
            del self._jobs[job]

    def _make_room(self) -> None:
        """Forget a job that does not exist if the maximum is followed.

        Otherwise questions for invented names would keep clients from the jobs that exist.
        """
        if len(self._jobs) < MAX_JOBS_WATCHED:
            return
        missing = [job for job, found in self._jobs.items() if found.revision == 0]
        if missing:
            del self._jobs[min(missing, key=lambda job: self._jobs[job].asked_at)]

    async def run(self) -> None:
        """Follow until cancelled; retry with growing pauses while the control plane fails."""
        retry_s = _RETRY_FIRST_S
        while True:
            if not self._jobs:
                self._asked.clear()
                await self._asked.wait()
            known = {job: found.revision for job, found in self._jobs.items()}
            self._is_waiting = None not in known.values()
            self._news = asyncio.ensure_future(self._watch(known, WAIT_S))
            try:
                await asyncio.wait([self._news])
                if self._news.cancelled():
                    continue
                news = self._news.result()
            except TwineError as e:
                if not self.failing:
                    log.warning("the control plane does not answer", extra={"why": str(e)})
                self.failing = str(e)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
                continue
            finally:
                self._news.cancel()
                self._news = None
            if self.failing:
                log.info("the control plane answers again")
            self.failing, retry_s = "", _RETRY_FIRST_S
            self._take(news)
            self._forget_idle(asyncio.get_running_loop().time())

    def _take(self, news: EndpointChanges) -> None:
        for endpoints in news.changed:
            self._learn(endpoints.job, endpoints.revision, endpoints)
        for job in news.missing:
            self._learn(job, 0, None)
        if news.changed or news.missing:
            self._changed()

    def _learn(self, job: str, revision: int, endpoints: Endpoints | None) -> None:
        found = self._jobs.get(job)
        if found is not None:
            found.revision, found.endpoints = revision, endpoints
            found.known.set()
