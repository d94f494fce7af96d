"""Time, chance and threads: what an actor may ask of the process that it runs in.

There is one for each process, and another kind in the simulated region, where hours pass in
milliseconds and the same seed gives the same run.
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
TURN_S = 0.0025
"""Computing time after which others get their turn. What a timer or a socket wakes runs in the
third turn from then, and a client is to wait for 10 ms at most."""
LARGE = 500
"""Tasks of a job that is computed beside the loop: what it takes for 10,000 is 10 to 50 ms."""
_BATCH_MAX = 64
PAUSE_S = 2.0
"""Standing still for this long is a pause. Below it is ordinary trouble: a busy host, a slow
disk; above it others had the time to conclude something from our silence, and we from theirs."""
TICK_S = 0.5
"""Between two looks at the clocks: a pause is known to within this."""


class Runtime:
    """The process as actors know it.

    Durations and deadlines are measured with `now`, which never goes back. What is decided by a
    date, because people named it or because it outlives the process, goes by `date`. `wall` is
    for certificates and the audit log: it may jump either way at any moment.
    """

    def __init__(
        self,
        wall: Clock = time.time,
        seed: int | None = None,
        boot: Clock = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        """Take the clocks, and the seed of `random`; None: one that cannot be guessed.

        `boot` also counts while the host is suspended.
        """
        self.wall = wall
        self.random = random.Random(seed)
        self.meter = Meter()
        self._boot = boot
        self._date = Date(wall, boot)
        self._beside = asyncio.Lock()
        self._turn_began: float | None = None
        self._batch = 1
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed_over: deque[asyncio.Future[None]] = deque()
        """Those that were resumed and found no time left in the turn."""
        self._seen: tuple[float, float, float] | None = None
        """now, boot and wall as they were seen last."""
        self._on_pause: list[Callable[[float], None]] = []
        self._on_failure: list[Callable[[str, BaseException], None]] = []

    def now(self) -> float:
        """Return seconds since some moment, for durations."""
        return asyncio.get_running_loop().time()

    def date(self) -> float:
        """Return seconds since 1970: the wall clock, without steps that are not believed yet."""
        return self._date.now()

    @property
    def booted_at(self) -> float:
        """Return the date at which the host booted, as far as that is believed."""
        return self._date.offset

    def go_on(self, booted_at: float) -> None:
        """Go on from what an earlier process on this boot of the host believed of the date."""
        self._date.go_on(booted_at)
        if doubted_s := self._date.doubted_s:
            log.warning(
                "the wall clock stepped before this process was started",
                extra={"seconds": round(doubted_s, 1)},
            )

    async def sleep(self, seconds: float) -> None:
        """Return after a while."""
        await asyncio.sleep(seconds)

    async def offload(self, work: Callable[..., T], *args: Any) -> T:
        """Compute something long beside the loop; it must not touch what the loop changes."""
        return await asyncio.to_thread(work, *args)

    async def compute(self, items: int, work: Callable[..., T], *args: Any) -> T:
        """Return the result of `work` about `items` tasks; from `LARGE` on it runs in a thread.

        One thread at a time: each takes Python's lock from the loop for half of the time.
        """
        if items < LARGE:
            return work(*args)
        async with self._beside:
            return await self.offload(work, *args)

    async def checkpoint(self) -> None:
        """Let others run if this turn of the loop has computed for `TURN_S`.

        The turn is that of the whole process: each computation in it takes from the same. Of
        those that had to wait as many go on in a turn as fitted into the last ones.
        """
        loop = asyncio.get_running_loop()
        if self._turn_began is None:
            self._turn_began, self._batch = time.perf_counter(), 1
            loop.call_soon(self._turn_over)
            return
        before_us = self._waiting
        while before_us or not self._has_time():
            turn: asyncio.Future[None] = loop.create_future()
            before_us.append(turn)
            await turn
            before_us = self._passed_over

    def _has_time(self) -> bool:
        return self._turn_began is None or time.perf_counter() - self._turn_began < TURN_S

    def _turn_over(self) -> None:
        """Let the first of those that wait compute in the next turn, and look after them.

        An actor that finds the turn used up by those before it waits again, still in front.
        """
        now, began = time.perf_counter(), self._turn_began
        if began is not None:
            fitted = now - began < TURN_S
            self._batch = min(2 * self._batch, _BATCH_MAX) if fitted else max(1, self._batch // 2)
        self._waiting.extendleft(reversed(self._passed_over))
        self._passed_over.clear()
        self._turn_began, left = None, self._batch
        while self._waiting and left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                left -= 1
        if left < self._batch:
            self._turn_began = now
            asyncio.get_running_loop().call_soon(self._turn_over)

    # -- work beside the caller

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin work that lasts; one that fails is logged, and told to `on_failure`."""
        task = asyncio.create_task(self.metered(name, work), name=name)
        task.add_done_callback(self._ended)
        return task

    def spawn_in(
        self, group: asyncio.TaskGroup, name: str, work: Coroutine[Any, Any, T]
    ) -> asyncio.Task[T]:
        """Begin work of a group, which sees to how it ends; its time is metered."""
        return group.create_task(self.metered(name, work), name=name)

    def metered(self, name: str, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return the same work, with the time that it takes counted by the meter."""
        return self.meter.metered(name, work)

    def on_failure(self, told: Callable[[str, BaseException], None]) -> Callable[[], None]:
        """Call `told(name, error)` when work that was spawned fails; returns what ends that."""
        return _listen(self._on_failure, told)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            name = task.get_name()
            log.error("work failed", exc_info=error, extra={"actor": name, "reason": str(error)})
            for told in tuple(self._on_failure):
                told(name, error)

    # -- standing still

    def on_pause(self, told: Callable[[float], None]) -> Callable[[], None]:
        """Call `told(seconds)` when this process stood still; returns what ends that.

        Stopped (SIGSTOP), suspended with its host, swapped out, or busy with itself: silence
        in that time was its own.
        """
        return _listen(self._on_pause, told)

    def paused(self, seconds: float) -> None:
        """Record that this process stood still until now."""
        log.warning("this process stood still", extra={"seconds": round(seconds, 1)})
        for told in tuple(self._on_pause):
            told(seconds)

    async def watch_clocks(self) -> None:
        """Notice pauses and steps of the wall clock, until cancelled."""
        self._seen = None
        while True:
            self.look_at_clocks()
            await asyncio.sleep(TICK_S)

    def look_at_clocks(self) -> None:
        """Notice now what `watch_clocks` would notice at its next look.

        After a pause everything that was due runs in any order: who concludes something from
        silence looks here first.
        """
        self._date.look()
        now, boot, wall = self.now(), self._boot(), self.wall()
        before, self._seen = self._seen, (now, boot, wall)
        if before is None:
            return
        passed_s, boot_s, wall_s = now - before[0], boot - before[1], wall - before[2]
        real_s = max(passed_s, boot_s)
        if real_s - TICK_S >= PAUSE_S:
            self.paused(real_s)
        if abs(wall_s - real_s) >= PAUSE_S:
            log.warning("the wall clock stepped", extra={"seconds": round(wall_s - real_s, 1)})


class SteppedRuntime(Runtime):
    """A process that does the same whenever the same happens, for tests and simulations.

    Turns are counted, nothing runs in another thread, and the host is never suspended. No time
    is metered: what a step takes here says nothing, and asking costs a twentieth of a run.
    """

    STEPS = 64
    """Calls of `checkpoint` after which others get their turn."""

    def __init__(self, wall: Clock, seed: int) -> None:
        """Take the clock of a world, and the seed of what is left to chance in it."""
        super().__init__(wall, seed, boot=self.now)
        self._steps = 0

    async def offload(self, work: Callable[..., T], *args: Any) -> T:
        """Compute at once, but let others run first, as they would beside a thread."""
        await asyncio.sleep(0)
        return work(*args)

    def metered(self, name: str, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:  # noqa: ARG002
        """Return the work as it is."""
        return work

    async def compute(self, items: int, work: Callable[..., T], *args: Any) -> T:
        """Compute something about so many tasks: here for a few, else beside the loop."""
        return work(*args) if items < LARGE else await self.offload(work, *args)

    async def checkpoint(self) -> None:
        """Let others run each `STEPS` calls."""
        self._steps += 1
        if self._steps % self.STEPS == 0:
            await asyncio.sleep(0)


def _listen(listeners: list[Callable[..., None]], told: Callable[..., None]) -> Callable[[], None]:
    listeners.append(told)
    return lambda: listeners.remove(told)
