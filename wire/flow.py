"""Flow control for a slow reader: at most one window of bytes is unacknowledged.

Without it one blocked stream blocks the whole websocket. Signals do not get through, the end is
not noticed, and pings of `duplex` are not answered, which closes the connection.
"""

from __future__ import annotations

import asyncio
from collections import deque

WINDOW_BYTES = 256 << 10
"""Unacknowledged bytes that may be sent to a reader that acknowledges."""


class SendWindow:
    """Bytes sent to the other side of a stream, and bytes that it has acknowledged."""

    def __init__(self) -> None:
        self._sent = 0
        self._acknowledged: int | None = None
        self._changed = asyncio.Event()

    @property
    def is_acknowledged(self) -> bool:
        """Whether the other side acknowledges the bytes that it reads."""
        return self._acknowledged is not None

    def acknowledge(self, total: int) -> None:
        """Record how many bytes the other side has read; the first call enables the limit."""
        self._acknowledged = total
        self._changed.set()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes may be sent, and count them.

        It does not wait for a reader that never acknowledged.
        """
        while self._acknowledged is not None and self._sent - self._acknowledged >= WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()
        self._sent += size


class ReceiveQueue:
    """Queue of received data that waits for its reader; None marks the end."""

    def __init__(self) -> None:
        self._queue: deque[bytes | None] = deque()
        self._size, self._read = 0, 0
        self._changed = asyncio.Event()

    async def put(self, data: bytes | None) -> None:
        """Append received data, once less than two windows of it are queued.

        A sender that exceeds two windows ignores acknowledgements: nothing more is read from it.
        """
        while self._size >= 2 * WINDOW_BYTES:
            self._changed.clear()
            await self._changed.wait()
        self._queue.append(data)
        self._size += _counted_bytes(data)
        self._changed.set()

    async def get(self) -> bytes | None:
        """Return the oldest data; wait until there is some."""
        while not self._queue:
            self._changed.clear()
            await self._changed.wait()
        data = self._queue.popleft()
        self._size -= _counted_bytes(data)
        self._changed.set()
        return data

    def add_read(self, size: int) -> int:
        """Add `size` bytes that were read, and return the total."""
        self._read += size
        return self._read


def _counted_bytes(data: bytes | None) -> int:
    """Return the bytes that queued data counts: at least one, so that empty frames are bounded."""
    return max(1, len(data or b""))
