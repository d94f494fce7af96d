"""Flow control to a slow reader: at most a window beyond what it has read is under way.

Without it one blocked stream blocks the whole conversation: no signal gets through, no end is
noticed, and the pings of `duplex` are not answered, so that the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections import deque

WINDOW_BYTES = 256 << 10
"""Unacknowledged bytes that may be under way to a reader that counts."""


class Outflow:
    """Bytes sent to the other side of a stream, and bytes that it has acknowledged."""

    def __init__(self) -> None:
        """Nothing was sent, and the reader has acknowledged nothing."""
        self._sent = 0
        self._taken: int | None = None
        self._news = asyncio.Event()

    @property
    def is_counted(self) -> bool:
        """Whether the other side acknowledges what it takes."""
        return self._taken is not None

    def taken(self, total: int) -> None:
        """Record how many bytes the other side has taken; the first call enables counting."""
        self._taken = total
        self._news.set()

    async def room(self, size: int) -> None:
        """Wait until `size` bytes may be sent, and count them; never waits for uncounting peers."""
        while self._taken is not None and self._sent - self._taken >= WINDOW_BYTES:
            self._news.clear()
            await self._news.wait()
        self._sent += size


class Inflow:
    """What came in order and waits to be taken; None is the end of it."""

    def __init__(self) -> None:
        self._held: deque[bytes | None] = deque()
        self._size, self._taken = 0, 0
        self._news = asyncio.Event()

    async def put(self, data: bytes | None) -> None:
        """Keep received data. Waits for room while two windows are held: a sender that sends more
        unasked does not count, and is read no further.
        """
        while self._size >= 2 * WINDOW_BYTES:
            self._news.clear()
            await self._news.wait()
        self._held.append(data)
        self._size += len(data or b"")
        self._news.set()

    async def get(self) -> bytes | None:
        """Return what came first, once there is something."""
        while not self._held:
            self._news.clear()
            await self._news.wait()
        data = self._held.popleft()
        self._size -= len(data or b"")
        self._news.set()
        return data

    def took(self, size: int) -> int:
        """Return how many bytes were taken in all, with these."""
        self._taken += size
        return self._taken
