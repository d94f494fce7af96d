"""The history of a store as its watchers read it: bounded, in order, each at its own pace."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import islice

from control_plane.store.protocol import Change, Compacted

HISTORY = 10_000
"""Transactions that are kept for watchers; a reader further behind must list again."""


class Feed:
    """A bounded tail of the revision log, kept by the engine and followed by watchers.

    A watcher holds a position, never a queue, so a slow one costs no memory.
    """

    def __init__(self, revision: int, compacted: int, history: int = HISTORY) -> None:
        """Start at a revision, with nothing known before `compacted`."""
        self.revision = revision
        self.compacted = compacted
        self._history = history
        self._batches: deque[tuple[int, tuple[Change, ...]]] = deque()
        self._more = asyncio.Event()

    def append(self, revision: int, changes: Sequence[Change]) -> None:
        """Add one transaction and wake the watchers."""
        self._batches.append((revision, tuple(changes)))
        self.revision = revision
        while len(self._batches) > self._history:
            self.compacted = self._batches.popleft()[0]
        self._more.set()
        self._more = asyncio.Event()

    def compact(self, revision: int) -> None:
        """Forget everything up to a revision; watchers that still need it are told."""
        self.compacted = max(self.compacted, min(revision, self.revision))
        while self._batches and self._batches[0][0] <= self.compacted:
            self._batches.popleft()
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, prefix: str, after: int) -> AsyncIterator[Change]:
        """Yield all changes below a prefix after a revision, for ever."""
        while True:
            more = self._more
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
                await more.wait()

    def _after(self, revision: int) -> list[tuple[int, tuple[Change, ...]]]:
        """Return the kept transactions after a revision; revisions have no gaps."""
        if not self._batches:
            return []
        return list(islice(self._batches, max(0, revision + 1 - self._batches[0][0]), None))
