"""Runs at most one allocation per job at a time, and bounds how long its caller waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from wire.errors import Busy

log = logging.getLogger(__name__)
ANSWER_S = 30.0
"""The longest that a caller waits; running work continues."""
_CLOSE_S = 1.0
T = TypeVar("T")


async def finish_or_cancel(work: Sequence[asyncio.Future[Any]]) -> None:
    """Wait a moment for running work, then cancel it, in its order."""
    if work:
        _, late = await asyncio.wait(work, timeout=_CLOSE_S)
        for one in work:
            if one in late:
                one.cancel()
        await asyncio.gather(*late, return_exceptions=True)


class JobTurns:
    """Allocations that run or wait for their turn, by job."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}
        """Job → event that is set when its allocation has ended."""
        self._work: dict[asyncio.Future[Any], None] = {}
        """Running work, whether or not a caller still waits for it."""

    @property
    def running(self) -> Collection[str]:
        """Return the jobs whose allocations run."""
        return self._running.keys()

    async def close(self) -> None:
        """Wait a moment for running work, then cancel it."""
        await finish_or_cancel(list(self._work))

    async def run(self, job: str, begin: Callable[[], Coroutine[None, None, T]]) -> T:
        """Run `begin` once no other allocation of this job runs; return its result.

        Raises `Busy` if that takes too long; the work continues.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._run_in_turn(job, begin)
        except TimeoutError as e:
            raise Busy(
                f"the tasks of job {job!r} have no machines yet: in {ANSWER_S:g} s a store has "
                "not answered, or too many allocations were ahead of it",
                hint="the allocation continues; ask again",
            ) from e

    async def _run_in_turn(self, job: str, begin: Callable[[], Coroutine[None, None, T]]) -> T:
        while (running := self._running.get(job)) is not None:
            await running.wait()
        self._running[job] = done = asyncio.Event()
        work = asyncio.ensure_future(begin())
        self._work[work] = None
        work.add_done_callback(lambda _: self._work.pop(work))
        try:
            return await asyncio.shield(work)  # once begun, it ends: no job is half allocated
        finally:
            if work.done():
                self._end(job, done)
            else:
                work.add_done_callback(lambda _: self._end_abandoned(job, done, work))

    def _end(self, job: str, done: asyncio.Event) -> None:
        self._running.pop(job, None)
        done.set()

    def _end_abandoned(self, job: str, done: asyncio.Event, work: asyncio.Future[Any]) -> None:
        """Record the end of an allocation for which no caller waits."""
        self._end(job, done)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.info("allocation failed", extra={"job": job, "reason": str(error)})
