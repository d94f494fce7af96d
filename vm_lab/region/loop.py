"""Virtual time: a timeline of events, and an asyncio loop that jumps along it.

Machines, agents, network and faults are events on a `Timeline`, not asyncio tasks, so an idle one
costs nothing. Only the control plane runs on a `VirtualLoop`. Instead of waiting, the loop's
selector runs the timeline's events until a callback of the loop is due. No code here reads a real
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from typing import Any, TypeVar, TypeVarTuple

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

BUSY_MAX = 2_000_000
"""Turns of the loop at one virtual time; more is a livelock."""

RESOLUTION_S = 1e-9
"""Times that differ by less are equal: sums of the same durations differ in their last bits."""


class Killed(BaseException):
    """The process of the control plane ends now; its tasks are not notified."""


class Stuck(RuntimeError):
    """No event is left, or virtual time does not advance."""


class Timeline:
    """Events in the order of time, then in the order in which they were scheduled."""

    def __init__(self) -> None:
        """Start at 0 without events."""
        self.now = 0.0
        """Seconds since the start."""
        self.events = 0
        """Events that have happened."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, when: float, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Schedule a call at a time; a past time means now."""
        self._scheduled += 1
        heapq.heappush(self._heap, (max(when, self.now), self._scheduled, call, args))

    def after(self, delay_s: float, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Schedule a call after `delay_s`."""
        self._scheduled += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._scheduled, call, args))

    def next_at(self) -> float:
        """Return when the next event is due; infinity: none is."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Run the next event."""
        when, _, call, args = heapq.heappop(self._heap)
        self.now = when
        self.events += 1
        call(*args)

    def run_until(self, when: float) -> None:
        """Run all events up to a time, and set the clock to it."""
        while self._heap and self._heap[0][0] <= when:
            self.step()
        self.now = max(self.now, when)


class _Selector(selectors.BaseSelector):
    """Runs the timeline's events, instead of waiting, until the loop has a callback to run."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.callbacks: Any = ()
        """The loop's queue of callbacks; an event that concerns the loop adds to it."""
        self.frozen_until = 0.0
        self.steps = 0
        self.kill_at_step = 0
        self.killed = False
        self.ended = False
        self.cleanup_s = 0.0
        """Seconds that the clock of a dead process advanced while its tasks were cancelled."""
        self._busy_turns = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.ended:
            self.cleanup_s += timeout or 0.0
            return []
        self.steps += 1
        if self.killed or self.steps == self.kill_at_step:
            raise Killed
        timeline = self.timeline
        if timeline.now < self.frozen_until:
            self._run_until_resumed()
            return []  # the loop computes again what is due
        if timeout is not None and timeout <= 0:
            self._busy_turns += 1
            if self._busy_turns > BUSY_MAX:
                raise Stuck(f"the control plane is busy forever at {timeline.now:.3f} s")
            return []
        self._busy_turns = 0
        self._wait(float("inf") if timeout is None else timeline.now + timeout)
        return []

    def note_idle(self) -> None:
        """Record that the loop has no callback that is due now."""
        self._busy_turns = 0

    def _wait(self, until: float) -> None:
        timeline, callbacks = self.timeline, self.callbacks
        while not callbacks:
            due = timeline.next_at()
            if due > until:
                timeline.now = until
                return
            if due == float("inf"):
                raise Stuck(f"every task waits for another at {timeline.now:.3f} s")
            timeline.step()
            if self.killed:
                raise Killed
            if timeline.now < self.frozen_until:
                self._run_until_resumed()
                return

    def _run_until_resumed(self) -> None:
        """Run other events while the process is stopped."""
        while self.timeline.now < self.frozen_until and not self.killed:
            due = self.timeline.next_at()
            if due > self.frozen_until:
                self.timeline.now = self.frozen_until
            else:
                self.timeline.step()
        if self.killed:
            raise Killed

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError("a simulated process has no files to wait for")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError("a simulated process has no files to wait for")

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class _Handle:
    """A callback of a loop, run once unless it is cancelled."""

    __slots__ = ("args", "call", "context")

    def __init__(
        self, call: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self.call: Callable[..., object] | None = call
        self.args = args
        self.context = context or copy_context()

    def cancel(self) -> None:
        self.call, self.args = None, ()

    def cancelled(self) -> bool:
        return self.call is None


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one life of the control plane's process.

    There are no threads: offloaded functions run at once. If the process is killed,
    `run_until_complete` raises `Killed`; `free` then releases the remaining tasks.

    A turn does the work of asyncio's, except for debug mode, files, signals and other threads.
    asyncio's own turns took a fifth of the CPU time of a run. Callbacks that are due at the same
    time run in the order in which they were scheduled.
    """

    get_debug = staticmethod(bool)  # returns False, without a Python call for each future

    def __init__(self, timeline: Timeline, *, shared: bool = False) -> None:
        """Run on a timeline that outlives this loop.

        With `shared`, other loops run on the timeline, too, and their owner advances the time
        (`run_while_due`).
        """
        self._virtual = _Selector(timeline)
        self._shared = shared
        super().__init__(self._virtual)
        self._virtual.callbacks = self._due = deque[_Handle]()
        self._timers: list[tuple[float, int, _Handle]] = []
        """A heap of time, order of scheduling, and callback."""
        self._timer_count = 0

    def time(self) -> float:
        """Return the virtual monotonic clock."""
        return self._virtual.timeline.now + self._virtual.cleanup_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Handle:
        """Schedule a callback for the next turn."""
        if self.is_closed():
            raise RuntimeError("the process of this loop has ended")
        handle = _Handle(callback, args, context)
        self._due.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        """Schedule a callback at a time of this loop's clock."""
        if self.is_closed():
            raise RuntimeError("the process of this loop has ended")
        handle = _Handle(callback, args, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Handle:
        """Schedule a callback after `delay` seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Wait if no callback is due, then run all that are."""
        due, timers = self._due, self._timers
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
        wait: float | None = None
        if due or self._stopping:  # type: ignore[attr-defined]
            wait = 0.0
        elif timers:
            wait = max(0.0, timers[0][0] - self.time())
        if self._shared and not self._virtual.ended and (wait is None or wait > RESOLUTION_S):
            self._virtual.note_idle()
            self.stop()
            return
        self._virtual.select(wait)
        now = self.time() + RESOLUTION_S
        while timers and timers[0][0] < now:
            due.append(heapq.heappop(timers)[2])
        for _ in range(len(due)):
            handle = due.popleft()
            if handle.call is not None:
                try:
                    handle.context.run(handle.call, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as e:
                    self.call_exception_handler({"message": "a callback failed", "exception": e})

    def run_while_due(self) -> None:
        """Run all callbacks that are due now; raise `Killed` if the process was killed.

        Only for a loop that shares its timeline.
        """
        if self._virtual.killed:
            raise Killed
        self.run_forever()

    @property
    def is_ready(self) -> bool:
        """Return whether the loop has a callback for the next turn, or was killed."""
        return self._virtual.killed or (bool(self._due) and not self.frozen)

    def next_at(self) -> float:
        """Return when the next callback of this loop is due; infinity: none is scheduled."""
        timers, timeline = self._timers, self._virtual.timeline
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
        if self._virtual.killed:
            return timeline.now
        due = timeline.now if self._due else timers[0][0] if timers else float("inf")
        return max(due, self._virtual.frozen_until, timeline.now)

    @property
    def steps(self) -> int:
        """Return how many turns the loop has made."""
        return self._virtual.steps

    def kill(self) -> None:
        """End the process before its next turn."""
        self._virtual.killed = True

    def kill_at_step(self, turns: int) -> None:
        """End the process after `turns` more turns of the loop."""
        self._virtual.kill_at_step = self._virtual.steps + max(1, turns)

    def freeze(self, until: float) -> None:
        """Stop the process until a time (SIGSTOP, suspend); other events continue."""
        self._virtual.frozen_until = max(self._virtual.frozen_until, until)

    @property
    def frozen(self) -> bool:
        """Return whether the process is stopped."""
        return self._virtual.timeline.now < self._virtual.frozen_until

    def free(self) -> None:
        """Cancel the tasks of a process that ended. Its connections must be severed already."""
        self._virtual.ended = True
        self.set_exception_handler(lambda _loop, _context: None)
        for _ in range(100):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            for _ in range(2):
                # a main task that ended in the turn of the kill stops the loop once more
                with contextlib.suppress(RuntimeError):
                    self.run_until_complete(asyncio.sleep(0))
        self.run_until_complete(self.shutdown_asyncgens())
        self.close()

    def run_in_executor(
        self, _executor: object, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Call the function now: with a thread the order of events would not be reproducible."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as e:
            future.set_exception(e)
        return future

    def _make_self_pipe(self) -> None:
        """Do nothing: no other thread wakes this loop."""

    def _close_self_pipe(self) -> None:
        """Do nothing: there is no pipe."""

    def _write_to_self(self) -> None:
        """Do nothing: there is only one thread."""
