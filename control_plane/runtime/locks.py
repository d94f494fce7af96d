"""Locks by name, one per record: they exist only while they are held or awaited."""

from __future__ import annotations

import asyncio
from collections import deque


class Locks:
    """The held names, each with its waiting coroutines in order of arrival.

    Most names are free, so taking one only adds an entry to a dictionary.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, name: str) -> None:
        """Return once the caller holds the name; it has to call `release` afterwards."""
        waiting = self._held.get(name)
        if waiting is None:
            self._held[name] = deque()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the name was passed to it at the same moment
                self.release(name)
            raise

    def release(self, name: str) -> None:
        """Pass a name to the first waiting coroutine; without one it is free."""
        waiting = self._held[name]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # else the waiting coroutine was cancelled
                turn.set_result(None)
                return
        del self._held[name]

    def is_held(self, name: str) -> bool:
        """Return whether a name is held."""
        return name in self._held

    def __len__(self) -> int:
        """Return how many names are held."""
        return len(self._held)
