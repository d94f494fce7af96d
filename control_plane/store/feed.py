"""The bounded history of a store; each watcher reads it in order, at its own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import takewhile

from control_plane.store.protocol import Compacted, KeyChange

HISTORY = 10_000
"""Changes that are kept for watchers; a reader further behind must list again."""
HISTORY_BYTES = 64 << 20
"""Limit on the size of their values, so that a few very large records do not fill memory."""


class Feed:
    """A bounded tail of the revision log, kept by the engine and followed by watchers.

    A watcher holds a position, never a queue, so a slow one costs no memory.
    """

    def __init__(self, revision: int, compacted: int, history: int = HISTORY) -> None:
        """Start at a revision, with no history before `compacted`."""
        self.revision = revision
        self.compacted = compacted
        self._history = history
        self._batches: deque[tuple[int, tuple[KeyChange, ...]]] = deque()
        self._changes = self._bytes = 0
        self._extended = asyncio.Event()

    def extend(self, transactions: Iterable[Sequence[KeyChange]]) -> None:
        """Add transactions, none of them empty, and wake the watchers."""
        for changes in transactions:
            self.revision = changes[0].revision
            self._batches.append((self.revision, tuple(changes)))
            self._changes += len(changes)
            self._bytes += _value_bytes(changes)
            while self._changes > self._history or self._bytes > HISTORY_BYTES:
                self.compacted = self._drop_oldest()
        self._wake()

    def compact(self, revision: int) -> None:
        """Drop everything up to a revision; watchers that still need it get `Compacted`."""
        self.compacted = max(self.compacted, min(revision, self.revision))
        while self._batches and self._batches[0][0] <= self.compacted:
            self._drop_oldest()
        self._wake()

    def skip_to(self, revision: int) -> None:
        """Continue at a revision whose history is unknown; watchers before it must list again."""
        self._batches.clear()
        self._changes = self._bytes = 0
        self.revision = self.compacted = revision
        self._wake()

    async def follow(self, prefix: str, after: int) -> AsyncIterator[KeyChange]:
        """Yield all changes below a prefix after a revision, forever."""
        while True:
            extended = self._extended
            if after < self.compacted:
                raise Compacted(
                    f"cannot watch {prefix!r} from revision {after}: the history starts after"
                    f" {self.compacted}",
                    hint="list the prefix again and watch from the revision of the list",
                )
            batches = self._after(after)
            for revision, changes in batches:
                for change in changes:
                    if change.key.startswith(prefix):
                        yield change
                after = revision
            if not batches:
                await extended.wait()

    def _drop_oldest(self) -> int:
        revision, changes = self._batches.popleft()
        self._changes -= len(changes)
        self._bytes -= _value_bytes(changes)
        return revision

    def _wake(self) -> None:
        self._extended.set()
        self._extended = asyncio.Event()

    def _after(self, revision: int) -> list[tuple[int, tuple[KeyChange, ...]]]:
        """Return the kept transactions after a revision, oldest first."""
        kept = list(takewhile(lambda batch: batch[0] > revision, reversed(self._batches)))
        kept.reverse()
        return kept


def _value_bytes(changes: Sequence[KeyChange]) -> int:
    return sum(len(change.value) for change in changes if change.value is not None)
