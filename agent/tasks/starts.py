"""Limits how many tasks start at the same time; they start in the order of their requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Starts:
    """Places for tasks that are starting. Their number changes with the host's pressure."""

    def __init__(self, allowed: int) -> None:
        """`allowed` is the number of places."""
        self.allowed = allowed
        self.under_way = 0
        self.asked: Callable[[], None] = lambda: None
        """Called whenever a task requests a place."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def allow(self, number: int) -> None:
        """Set the number of places; a task that holds a place keeps it."""
        self.allowed = number
        self._admit()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold a place while a task starts."""
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self.asked()
        self._admit()
        try:
            await mine
            yield
        finally:
            if mine.done() and not mine.cancelled():
                self.under_way -= 1
            else:
                mine.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.under_way < self.allowed:
            first = self._waiting.popleft()
            if not first.done():
                self.under_way += 1
                first.set_result(None)
