"""Runs blocking calls outside the event loop: one lane (thread) per interface to the host.

Calls of one lane run in the order in which they were made, so the interfaces need no locks. The
start of a task makes six calls. Most take less time than the overhead of an executor of the
standard library, which creates a second future per call for waiting threads (docs/adr/0120).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    call: Callable[[], Any]


class _Lane:
    """A thread that makes one call after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: _Call) -> None:
        self._calls.put(call)

    def end(self) -> None:
        """Wait until all queued calls are done, then end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            if not item.future.cancelled():
                _run_call(item)
            del item  # else it would stay in memory until the next call


def _run_call(item: _Call) -> None:
    result, error = None, None
    try:
        result = item.call()
    except BaseException as e:  # raised again in the waiting caller
        error = e
    try:
        item.loop.call_soon_threadsafe(_deliver, item.future, result, error)
    except RuntimeError:
        if not item.loop.is_closed():
            raise


def _deliver(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Lanes:
    """Named threads, created when first used."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    async def run(self, lane: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `call(*args, **kwargs)`, run in the lane's thread.

        A call that has started runs to its end, even if the waiting task is cancelled. A call that
        has not started by then is skipped.
        """
        thread = self._lanes.get(lane)
        if thread is None:
            thread = self._lanes[lane] = _Lane(lane)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        thread.put(_Call(loop, future, lambda: call(*args, **kwargs)))
        return await future

    def close(self) -> None:
        """Wait for all queued calls, then end all threads."""
        for lane in self._lanes.values():
            lane.end()
        self._lanes.clear()


class PatientCall(Generic[T]):
    """A call in a lane for which callers wait only a limited time; it never runs twice at once."""

    def __init__(self, lanes: Lanes, lane: str, call: Callable[[], T]) -> None:
        self._lanes, self._lane, self._call = lanes, lane, call
        self._running: asyncio.Future[T] | None = None
        """The call that has not returned yet, or whose result no caller has received."""

    async def within(self, timeout_s: float) -> T:
        """Return the result of the call; raise `TimeoutError` if that takes longer.

        A call that still runs is awaited by the next caller, and not made again before it returns.
        """
        running = self._running
        if running is None:
            running = asyncio.ensure_future(self._lanes.run(self._lane, self._call))
            self._running = running
        await asyncio.wait({running}, timeout=timeout_s)
        if not running.done():
            raise TimeoutError
        if self._running is running:
            self._running = None
        return running.result()

    def cancel(self) -> None:
        """Stop waiting for the call; it still runs to its end."""
        if self._running is not None:
            self._running.cancel()
