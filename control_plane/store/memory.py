"""The store as a dictionary, for fast tests and simulations.

Opening the same object again is a restart: the records are there, the epoch is
one higher, and watches begin again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Self

from control_plane.store.bounds import Bounds
from control_plane.store.feed import HISTORY, Feed
from control_plane.store.protocol import (
    LAST,
    Entry,
    KeyChange,
    Listing,
    Operation,
    Put,
    check_transaction,
    stale_error,
)
from control_plane.store.write_times import WriteTimes
from wire.errors import Busy


class MemoryStore:
    """Implements `control_plane.store.Store`; durable as long as the object lives."""

    def __init__(self, history: int = HISTORY, *, strict: bool = False) -> None:
        """Start empty; `strict` refuses what not every engine accepts (`bounds`)."""
        self.bounds = Bounds(strict=strict)
        self.times = WriteTimes()
        self._entries: dict[str, Entry] = {}
        self._order: list[str] | None = None
        """All keys sorted; None: sorted at the next list."""
        self._history = history
        self._epoch = 0
        self._revision = 0
        self._open = False
        self._feed: Feed | None = None

    async def __aenter__(self) -> Self:
        """Open; `Busy` for a second owner, like the file lock of the SQLite store."""
        if self._open:
            raise Busy("cannot open the store: another process owns it")
        self._open = True
        self._epoch += 1
        self._feed = Feed(self._revision, self._revision, self._history)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        self._open = False

    def epoch(self) -> int:
        """Return how often the store was opened."""
        return self._epoch

    def revision(self) -> int:
        """Return the newest revision."""
        return self._revision

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        return self._entries.get(key)

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key."""
        if self._order is None:
            self._order = sorted(self._entries)
        begin = max(bisect_left(self._order, prefix), bisect_right(self._order, after))
        end = bisect_left(self._order, prefix + LAST)
        if limit is not None:
            end = min(end, begin + limit)
        found = tuple(self._entries[key] for key in self._order[begin:end])
        return Listing(revision=self._revision, entries=found)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Apply all operations, or none and raise `Conflict`."""
        check_transaction(compare, operations)
        self.bounds.check(operations)
        for key, expected in compare.items():
            entry = self._entries.get(key)
            if (found := entry.revision if entry else 0) != expected:
                raise stale_error(key, expected, found)
        if not operations:
            return self._revision
        self._revision += 1
        changes = []
        for operation in operations:
            if isinstance(operation, Put):
                if operation.key not in self._entries:
                    self._order = None
                entry = Entry(operation.key, operation.value, self._revision)
                self._entries[operation.key] = entry
                changes.append(KeyChange(operation.key, operation.value, self._revision))
            else:
                if self._entries.pop(operation.key, None):
                    self._order = None
                changes.append(KeyChange(operation.key, None, self._revision))
        self._open_feed().extend([changes])
        return self._revision

    def failure(self) -> str:
        """Return an empty text: memory does not fail."""
        return ""

    async def wait_failed(self) -> None:
        """Return never."""
        await asyncio.Event().wait()

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield changes after a revision."""
        return self._open_feed().follow(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Drop the history up to a revision."""
        self._open_feed().compact(revision)

    def _open_feed(self) -> Feed:
        if self._feed is None:
            raise Busy("cannot use the store: it is not open")
        return self._feed
