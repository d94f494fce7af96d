"""Clocks, randomness, threads and turns of the event loop, for all components of a process.

Each process has one `Runtime`. The simulated region has another kind, with virtual time: hours pass
in milliseconds, and one seed always gives the same run.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from control_plane.runtime.date import Date
from control_plane.runtime.meter import Meter

log = logging.getLogger(__name__)
T = TypeVar("T")
Clock = Callable[[], float]
"""Seconds since 1970."""
TURN_S = 0.0015
"""Computing time in one turn of the event loop. A task that a timer or a socket wakes runs in the
third turn after that, and a client must wait for at most 10 ms. A garbage collection, or the code
between two checkpoints, can add 1 to 3 ms to each turn."""
LARGE = 500
"""Tasks of a job from which on it is computed in a thread: 10,000 tasks take 10 to 50 ms."""
_BATCH_MAX = 64
PAUSE_S = 2.0
"""A process that did not run for this long was paused. Shorter gaps are normal: a busy host or a
slow disk. After a longer one, other components may have treated this process as lost."""
TICK_S = 0.5
"""Seconds between two checks of the clocks: the precision of the length of a pause."""


class Runtime:
    """The clocks, random numbers and threads of one process.

    `now` measures durations and deadlines and never steps back. `date` is for dates that users name
    and for times that outlive the process. `wall` is for certificates and the audit log: it can
    step in either direction at any time.
    """

    def __init__(
        self,
        wall: Clock = time.time,
        seed: int | None = None,
        boot: Clock = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        """Create the clocks and `random`; without `seed` its numbers cannot be predicted.

        `boot` also counts while the host is suspended.
        """
        self.wall = wall
        self.random = random.Random(seed)
        self.meter = Meter()
        self._boot = boot
        self._date = Date(wall, boot)
        self._thread_lock = asyncio.Lock()
        self._turn_began: float | None = None
        self._batch = 1
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed_over: deque[asyncio.Future[None]] = deque()
        """Callers that were resumed, but the time of the turn was used up."""
        self._answers: deque[asyncio.Future[None]] = deque()
        """Callers that compute an answer for a waiting client."""
        self._was_answer = False
        """Whether the present turn belongs to a caller of `_answers`."""
        self._last_check: tuple[float, float, float] | None = None
        """`now`, `boot` and `wall` at the last check."""
        self._on_pause: list[Callable[[float], None]] = []
        self._on_failure: list[Callable[[str, BaseException], None]] = []

    def now(self) -> float:
        """Return seconds since an arbitrary moment, to measure durations."""
        return asyncio.get_running_loop().time()

    def date(self) -> float:
        """Return seconds since 1970: the wall clock without steps younger than an hour."""
        return self._date.now()

    @property
    def booted_at(self) -> float:
        """Return the date at which the host booted, by `date`."""
        return self._date.offset

    def resume_date(self, booted_at: float) -> None:
        """Continue the date of an earlier process on the same boot of the host."""
        self._date.resume(booted_at)
        if doubted_s := self._date.doubted_s:
            log.warning(
                "the wall clock stepped before this process was started",
                extra={"seconds": round(doubted_s, 1)},
            )

    async def sleep(self, seconds: float) -> None:
        """Return after a number of seconds."""
        await asyncio.sleep(seconds)

    async def offload(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` in a thread; it must not use values that the event loop changes."""
        return await asyncio.to_thread(work, *args)

    async def compute(self, items: int, work: Callable[..., T], *args: Any) -> T:
        """Return the result of `work` about `items` tasks; from `LARGE` on it runs in a thread.

        One thread at a time: each takes Python's lock from the loop for half of the time.
        """
        if items < LARGE:
            return work(*args)
        async with self._thread_lock:
            return await self.offload(work, *args)

    async def checkpoint(self, *, answers: bool = False) -> None:
        """Let other tasks of the loop run if this turn has computed for `TURN_S`.

        All tasks of the process share the turn. The number of waiting callers that continue in a
        turn doubles while they fit into it and halves when they do not. With `answers` the caller
        computes an answer that a client waits for: such callers share every second turn, because
        the wait for thousands of others at each checkpoint would exceed the client's timeout.
        """
        loop = asyncio.get_running_loop()
        if self._turn_began is None:
            self._turn_began, self._batch = time.perf_counter(), 1
            loop.call_soon(self._end_turn)
            return
        queue = self._answers if answers else self._waiting
        while queue or not self._has_time():
            turn: asyncio.Future[None] = loop.create_future()
            queue.append(turn)
            await turn
            queue = self._passed_over

    def _has_time(self) -> bool:
        return self._turn_began is None or time.perf_counter() - self._turn_began < TURN_S

    def _end_turn(self) -> None:
        """End the turn, and resume the first waiting callers in the next one.

        A caller that finds the time of the turn used up waits again, at the front of the queue.
        """
        now, began = time.perf_counter(), self._turn_began
        if began is not None and not self._was_answer:
            fitted = now - began < TURN_S
            self._batch = min(2 * self._batch, _BATCH_MAX) if fitted else max(1, self._batch // 2)
        self._waiting.extendleft(reversed(self._passed_over))
        self._passed_over.clear()
        self._was_answer = bool(self._answers) and not (self._was_answer and self._waiting)
        queue, left = (self._answers, 1) if self._was_answer else (self._waiting, self._batch)
        self._turn_began, has_resumed = None, False
        while queue and left:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                left, has_resumed = left - 1, True
        if has_resumed or self._answers or self._waiting:
            self._turn_began = now
            asyncio.get_running_loop().call_soon(self._end_turn)

    # -- background work

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start background work; a failure is logged and reported to `on_failure`."""
        task = asyncio.create_task(self.metered(name, work), name=name)
        task.add_done_callback(self._report_if_failed)
        return task

    def spawn_in(
        self, group: asyncio.TaskGroup, name: str, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Start work in a task group, which handles its failure; its time is metered."""
        return group.create_task(self.metered(name, work), name=name)

    def metered(self, name: str, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return the same work, with its computing time counted by the meter."""
        return self.meter.metered(name, work)

    def on_failure(self, notify: Callable[[str, BaseException], None]) -> Callable[[], None]:
        """Call `notify(name, error)` when spawned work fails; return a function that ends this."""
        return _add_listener(self._on_failure, notify)

    def _report_if_failed(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            name = task.get_name()
            log.error("work failed", exc_info=error, extra={"actor": name, "reason": str(error)})
            for notify in tuple(self._on_failure):
                notify(name, error)

    # -- pauses

    def on_pause(self, notify: Callable[[float], None]) -> Callable[[], None]:
        """Call `notify(seconds)` after each pause; return a function that ends this.

        A pause is SIGSTOP, a suspended host, swapping, or a blocked event loop. Silence of other
        components in that time says nothing about them.
        """
        return _add_listener(self._on_pause, notify)

    def report_pause(self, seconds: float) -> None:
        """Log a pause that has just ended, and notify the listeners."""
        log.warning("this process was paused", extra={"seconds": round(seconds, 1)})
        for notify in tuple(self._on_pause):
            notify(seconds)

    async def watch_clocks(self) -> None:
        """Detect pauses and steps of the wall clock, until cancelled."""
        self._last_check = None
        while True:
            self.check_clocks()
            await asyncio.sleep(TICK_S)

    def check_clocks(self) -> None:
        """Check the clocks now, as `watch_clocks` does at its next check.

        After a pause all due callbacks run in any order. Code that draws conclusions from silence
        calls this first.
        """
        self._date.update()
        now, boot, wall = self.now(), self._boot(), self.wall()
        before, self._last_check = self._last_check, (now, boot, wall)
        if before is None:
            return
        passed_s, boot_s, wall_s = now - before[0], boot - before[1], wall - before[2]
        real_s = max(passed_s, boot_s)
        if real_s - TICK_S >= PAUSE_S:
            self.report_pause(real_s)
        if abs(wall_s - real_s) >= PAUSE_S:
            log.warning("the wall clock stepped", extra={"seconds": round(wall_s - real_s, 1)})


class SteppedRuntime(Runtime):
    """A deterministic runtime for tests and simulations.

    It counts calls instead of time, uses no threads, and its host is never suspended. It meters no
    computing time: that would take 5 % of a run and mean nothing on virtual time.
    """

    STEPS = 64
    """Calls of `checkpoint` in one turn."""

    def __init__(self, wall: Clock, seed: int) -> None:
        """`wall` is the virtual clock; `seed` gives the random numbers."""
        super().__init__(wall, seed, boot=self.now)
        self._steps = 0

    async def offload(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work` here, after other tasks of the loop had a turn, as with a thread."""
        await asyncio.sleep(0)
        return work(*args)

    def metered(self, name: str, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:  # noqa: ARG002
        """Return the work unchanged."""
        return work

    async def compute(self, items: int, work: Callable[..., T], *args: Any) -> T:
        """Run `work` about `items` tasks; from `LARGE` on other tasks of the loop run first."""
        return work(*args) if items < LARGE else await self.offload(work, *args)

    async def checkpoint(self, *, answers: bool = False) -> None:  # noqa: ARG002
        """Let other tasks of the loop run after each `STEPS` calls."""
        self._steps += 1
        if self._steps % self.STEPS == 0:
            await asyncio.sleep(0)


def _add_listener(
    listeners: list[Callable[..., None]], listener: Callable[..., None]
) -> Callable[[], None]:
    listeners.append(listener)
    return lambda: listeners.remove(listener)
