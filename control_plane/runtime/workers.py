"""Keyed workers: few asyncio tasks for any number of keys, and one timer for all of them.

A key is an object with recurring work: a job, a machine. An idle key
costs at most an entry of a heap.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from control_plane.runtime.runtime import Runtime
from wire.errors import TwineError

log = logging.getLogger(__name__)
Work = Callable[[str], Awaitable[float | None]]
"""Runs one round for a key; returns the seconds until the next one, None: once it is woken."""
_RETRY_MAX_S = 60.0
_STALE = 64
"""Entries of the heap that may be out of date before it is rebuilt."""
_WOKEN_AT_ONCE = 50
"""Keys that one run of the timer wakes; other work runs before the rest. A key takes 10 to 40 µs of
CPU, depending on how much of its data is in the caches."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many rounds run at once, and the pauses between rounds of a key."""

    limit: int = 64
    """Keys with a running round at once."""
    gather_s: float = 0.0
    """Minimum time from the end of a key's round to its next one, so that many wake-ups cause few
    rounds."""
    retry_s: float = 2.0
    """Pause after a failed round; doubles up to a minute. Wake-ups do not shorten the first."""


class Workers:
    """Runs rounds for keys: as many at once as the pace allows; waiting keys run in order.

    A key never has two rounds at once. A key that is woken during its round gets another
    round after it, so no wake-up is missed.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        work: Work,
        pace: Pace | None = None,
        gather_s: Callable[[str], float] | None = None,
    ) -> None:
        """Rounds begin with `run`. `name` is for logs and the meter.

        `gather_s(key)` replaces the pace's value where rounds of keys differ in cost.
        """
        self.failed: dict[str, str] = {}
        """Key → why its last round failed."""
        self._runtime, self._name, self._work = runtime, name, work
        self._pace = pace or Pace()
        self._gather_s = gather_s or (lambda _: self._pace.gather_s)
        self._group: asyncio.TaskGroup | None = None
        self._idle: asyncio.Future[None] | None = None
        """Resolved to give `run` itself work; None while it has some."""
        self._workers = 0
        self._busy: dict[str, bool] = {}
        """Keys in a round → whether they were woken since it began."""
        self._ready: dict[str, None] = {}
        self._queue: deque[str] = deque()
        """The order of `_ready`; forgotten keys are skipped."""
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._delayed: dict[str, float] = {}
        """Key → when its next round may begin at the earliest."""
        self._delays: deque[tuple[float, str]] = deque()
        self._failures: dict[str, int] = {}

    async def run(self) -> None:
        """Run rounds until cancelled; keys that were woken before come first."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._set_timer()
                while True:  # this task works, too: keys that arrive one by one need no other
                    idle = self._idle = asyncio.get_running_loop().create_future()
                    self._start_workers()
                    await idle
                    await self._work_queue()
            finally:
                self._group = self._idle = None  # wake-ups may still arrive during shutdown
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def wake(self, key: str) -> None:
        """Begin a round for a key as soon as its turn comes."""
        if key in self._busy:
            self._busy[key] = True
            return
        if key in self._ready:
            return
        delayed_until = self._delayed.get(key)
        if delayed_until is not None and delayed_until > self._runtime.now():
            self.wake_at(key, delayed_until)
            return
        self._due.pop(key, None)
        self._ready[key] = None
        self._queue.append(key)
        self._start_workers()

    def wake_at(self, key: str, when: float) -> None:
        """Begin a round for a key at this time of `now`, unless it is due earlier."""
        known = self._due.get(key)
        when = max(when, self._delayed.get(key, when))
        if key in self._ready or (known is not None and known <= when):
            return
        self._due[key] = when
        if len(self._heap) > 2 * len(self._due) + _STALE:
            self._heap = [(at, name) for name, at in self._due.items()]
            heapify(self._heap)
        else:
            heappush(self._heap, (when, key))
        self._set_timer()

    def forget(self, key: str) -> None:
        """Drop all state of a key; a running round of it ends by itself."""
        for known in (self._due, self._ready, self._delayed, self._failures, self.failed):
            known.pop(key, None)
        if key in self._busy:
            self._busy[key] = False

    def is_idle(self) -> bool:
        """Return whether no key has a running round or waits for its turn."""
        return not self._busy and not self._ready

    # -- inside

    def _start_workers(self) -> None:
        wanted = min(self._pace.limit, len(self._busy) + len(self._ready))
        while self._group is not None and self._workers < wanted:
            self._workers += 1
            if self._idle is not None:
                self._idle.set_result(None)
                self._idle = None
            else:
                self._runtime.spawn_in(self._group, self._name, self._work_queue())

    async def _work_queue(self) -> None:
        """Run rounds until no key waits."""
        try:
            while self._queue:
                await self._runtime.checkpoint()  # many may have been started in one turn
                while self._queue:
                    key = self._queue.popleft()
                    if key in self._ready:
                        del self._ready[key]
                        await self._round(key)
                        break
        finally:
            self._workers -= 1

    async def _round(self, key: str) -> None:
        self._busy[key] = False
        try:
            next_s = await self._work(key)
        except TwineError as e:
            next_s = self._back_off(key, str(e))
            log.warning(
                "round failed", extra={"actor": self._name, "object": key, "reason": str(e)}
            )
        except Exception as e:
            next_s = self._back_off(key, f"{type(e).__name__}: {e}")
            log.exception("round failed", extra={"actor": self._name, "object": key})
        else:
            self._failures.pop(key, None)
            self.failed.pop(key, None)
            self._delay_next(key, self._gather_s(key))
        finally:
            woken = self._busy.pop(key)
        if next_s is not None:
            self.wake_at(key, self._runtime.now() + next_s)
        if woken:
            self.wake(key)

    def _back_off(self, key: str, reason: str) -> float:
        """Note the failure of a round, and return the seconds until the next try."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self.failed[key] = reason
        self._delay_next(key, self._pace.retry_s)
        return min(self._pace.retry_s * 2.0 ** min(failures, 16), _RETRY_MAX_S)

    def _delay_next(self, key: str, seconds: float) -> None:
        now = self._runtime.now()
        while self._delays and self._delays[0][0] <= now:
            until, delayed = self._delays.popleft()
            if self._delayed.get(delayed) == until:
                del self._delayed[delayed]
        if seconds > 0:
            self._delayed[key] = now + seconds
            self._delays.append((now + seconds, key))

    def _set_timer(self) -> None:
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        if not self._heap or self._group is None:
            return
        when = self._heap[0][0]
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, when - self._runtime.now()), self._wake_due)

    def _wake_due(self) -> None:
        self._timer = None
        now = self._runtime.now()
        for _ in range(_WOKEN_AT_ONCE):
            if not self._heap or self._heap[0][0] > now:
                break
            when, key = heappop(self._heap)
            if self._due.get(key) == when:
                del self._due[key]
                self.wake(key)
        self._set_timer()
