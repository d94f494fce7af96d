"""Limits how many tasks start at the same time; waiting tasks start in order of request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Starts:
    """Slots for tasks that are starting. Their number changes with the host's pressure."""

    def __init__(self, allowed: int) -> None:
        """`allowed` is the number of slots."""
        self.allowed = allowed
        self.starting = 0
        """Number of tasks that hold a slot."""
        self.on_request: Callable[[], None] = lambda: None
        """Called whenever a task requests a slot."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def allow(self, number: int) -> None:
        """Set the number of slots; a task that holds a slot keeps it."""
        self.allowed = number
        self._admit()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the block ends."""
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        self.on_request()
        self._admit()
        try:
            await slot
            yield
        finally:
            if slot.done() and not slot.cancelled():
                self.starting -= 1
            else:
                slot.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self.starting < self.allowed:
            first = self._waiting.popleft()
            if not first.done():
                self.starting += 1
                first.set_result(None)
