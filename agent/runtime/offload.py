"""Carries blocking calls off the event loop, one lane (thread) per mutating interface.

Calls of one lane run in the order they were made, so the interfaces need no locks. A start of a
task makes six, and most are over sooner than what the standard library's executors do for one:
they have a second future each, for threads that wait, and there are none here (docs/adr/0120).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

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
        """Wait until all that was asked for is done."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            if not asked.future.cancelled():
                _make(asked)
            del asked  # nothing of it is kept until the next one comes


def _make(asked: _Call) -> None:
    found, error = None, None
    try:
        found = asked.call()
    except BaseException as e:  # raised again in the waiting caller
        error = e
    try:
        asked.loop.call_soon_threadsafe(_tell, asked.future, found, error)
    except RuntimeError:
        if not asked.loop.is_closed():
            raise


def _tell(future: asyncio.Future[Any], found: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(found)
    else:
        future.set_exception(error)


class Lanes:
    """Named threads, made when first used."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}

    async def run(self, lane: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `call(*args, **kwargs)`, run in the lane's thread.

        Once started the call runs to its end even if the waiting task is cancelled; one that has
        not begun by then is not made.
        """
        found = self._lanes.get(lane)
        if found is None:
            found = self._lanes[lane] = _Lane(lane)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        found.put(_Call(loop, future, lambda: call(*args, **kwargs)))
        return await future

    def close(self) -> None:
        """Wait for what was asked for, then end all threads."""
        for lane in self._lanes.values():
            lane.end()
        self._lanes.clear()
