"""The scheduler's requests to the allocator, which run concurrently with the rounds of jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from control_plane.agents.region import Region
from control_plane.allocator.core.request import Allocation, Request
from control_plane.runtime.workers import Workers
from control_plane.scheduler.ports import Places
from wire.errors import Conflict, TwineError

log = logging.getLogger(__name__)
OVERTAKEN_S = 0.1
"""Time to the next round after another writer changed a record first."""


class AllocationRequests:
    """At most one running request per job, and its answer for the job's next round."""

    def __init__(self, region: Region, allocator: Places, workers: Workers) -> None:
        self._runtime, self._retry_s = region.runtime, region.settings.retry_s
        self._allocator, self._workers = allocator, workers
        self._answers: dict[str, tuple[Request, Allocation]] = {}
        """Job → the last request and the allocator's answer, for the next round."""
        self.asking: set[str] = set()
        """Jobs for which machines are being allocated."""
        self.answered: Callable[[str], None] = lambda _job: None
        """Called with a job whose request has ended."""

    def is_pending(self, job: str) -> bool:
        """Return whether a request of a job runs, or its answer waits for the next round."""
        return job in self._answers or job in self.asking

    def take_answer(self, job: str, request: Request | None) -> Allocation | None:
        """Return the allocator's answer to exactly this request, if there is one."""
        answered = self._answers.pop(job, None)
        if request is None:
            return None
        if answered is not None and answered[0] == request:
            return answered[1]
        return self._allocator.known(request) if request.groups else None

    def ask(self, job: str, request: Request, group: asyncio.TaskGroup | None) -> None:
        """Allocate machines concurrently with the rounds of the job, unless a request runs.

        A failing store delays an allocation until it recovers. All other work on the job, and
        changes by its owner, must not wait for that (BUG-CP5).
        """
        if group is not None and job not in self.asking:
            self.asking.add(job)
            self._runtime.spawn_in(group, "scheduler", self._allocate(job, request))

    def forget(self, job: str) -> None:
        """Drop the answer for a job that was deleted or belongs to another shard."""
        self._answers.pop(job, None)

    async def _allocate(self, job: str, request: Request) -> None:
        try:
            if request.groups:
                allocation = await self._allocator.allocate(request)
                self._answers[job] = (request, allocation)
            else:
                await self._allocator.forget(job)
        except TwineError as e:
            log.warning("no machines", extra={"job": job, "reason": str(e)})
            pause_s = OVERTAKEN_S if isinstance(e, Conflict) else self._retry_s
            self._workers.wake_at(job, self._runtime.now() + pause_s)
        except Exception:
            log.exception("no machines", extra={"job": job})
            self._workers.wake_at(job, self._runtime.now() + self._retry_s)
        else:
            self.answered(job)
        finally:
            self.asking.discard(job)
