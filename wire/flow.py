"""Flow control for a slow reader: at most one window of bytes is unacknowledged.

Without it one blocked stream blocks the whole websocket. Signals do not get through, the end is
not noticed, and pings of `duplex` are not answered, which closes the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque

WINDOW_BYTES = 256 << 10
"""Unacknowledged bytes that may be sent to a reader that acknowledges."""


class Outflow:
    """Bytes sent to the other side of a stream, and bytes that it has acknowledged."""

    def __init__(self) -> None:
        self._sent = 0
        self._taken: int | None = None
        self._news = asyncio.Event()

    @property
    def is_counted(self) -> bool:
        """Whether the other side acknowledges the bytes that it reads."""
        return self._taken is not None

    def taken(self, total: int) -> None:
        """Record how many bytes the other side has taken; the first call enables counting."""
        self._taken = total
        self._news.set()

    async def room(self, size: int) -> None:
        """Wait until `size` bytes may be sent, and count them. A reader that never acknowledged
        is not waited for.
        """
        while self._taken is not None and self._sent - self._taken >= WINDOW_BYTES:
            self._news.clear()
            await self._news.wait()
        self._sent += size


class Inflow:
    """Queue of received data that waits for its reader; None marks the end."""

    def __init__(self) -> None:
        self._held: deque[bytes | None] = deque()
        self._size, self._taken = 0, 0
        self._news = asyncio.Event()

    async def put(self, data: bytes | None) -> None:
        """Append received data. Waits while two windows are held: a sender that exceeds them
        ignores acknowledgements, and nothing more is read from it.
        """
        while self._size >= 2 * WINDOW_BYTES:
            self._news.clear()
            await self._news.wait()
        self._held.append(data)
        self._size += _cost(data)
        self._news.set()

    async def get(self) -> bytes | None:
        """Return the oldest data; wait until there is some."""
        while not self._held:
            self._news.clear()
            await self._news.wait()
        data = self._held.popleft()
        self._size -= _cost(data)
        self._news.set()
        return data

    def took(self, size: int) -> int:
        """Add `size` bytes that were read, and return the total."""
        self._taken += size
        return self._taken


def _cost(data: bytes | None) -> int:
    """Return what held data counts, at least one byte: frames without data are bounded, too."""
    return max(1, len(data or b""))
