"""Records that another process owns, kept up by watching its store."""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left

from agent.errors import TwineError
from control_plane.runtime.readable import PAGE, Readable, T
from control_plane.runtime.runtime import Runtime
from control_plane.store import Compacted, Entry, KeyChange

log = logging.getLogger(__name__)
_RETRY_S = 1.0
"""Pause after the store did not answer; what is known is read on meanwhile."""


class Followed(Readable[T]):
    """A copy that is read like the owner's table, and is a little behind it.

    It never shows an older state of a record after a newer one. What is missed while the store
    is away, or because its history was cut, is made up for by listing everything again.
    """

    _at: int = 0
    """The store's revision after which changes are still to come."""
    _pages: tuple[tuple[str, int], ...] = ()
    """Last key of each page of the newest list, and the revision at which it was read."""

    async def load(self) -> None:
        """Read everything; listeners are told page by page, as by the owner's table."""
        for page in await self._list():
            self._show_page(page)
            await asyncio.sleep(0)
        self.begin()

    async def run(self, runtime: Runtime) -> None:
        """Follow the store for ever."""
        while True:
            try:
                async for change in self.store.watch(self.prefix, self._at):
                    self._take_in(change)
            except Compacted:
                await self._catch_up(runtime)
            except TwineError as e:
                log.warning("store not followed", extra={"prefix": self.prefix, "reason": str(e)})
                await runtime.sleep(_RETRY_S)

    async def _catch_up(self, runtime: Runtime) -> None:
        """List everything again and show what is different."""
        while True:
            try:
                entries = [entry for page in await self._list() for entry in page]
                break
            except TwineError as e:
                log.warning("store not followed", extra={"prefix": self.prefix, "reason": str(e)})
                await runtime.sleep(_RETRY_S)
        found = {entry.key[len(self.prefix) :]: entry for entry in entries}
        for name in [name for name in self.names() if name not in found]:
            self._put(name, None, 0)
        for name, entry in found.items():
            await runtime.breathe()
            if entry.revision != self.revision(name):
                self._put(name, self._read(name, entry), entry.revision)

    async def _list(self) -> list[tuple[Entry, ...]]:
        """Return all pages; what happened between two of them comes again in the watch."""
        found: list[tuple[Entry, ...]] = []
        limits: list[tuple[str, int]] = []
        after, full = "", True
        while full:
            listing = await self.store.list_prefix(self.prefix, after, PAGE)
            found.append(listing.entries)
            full = len(listing.entries) == PAGE
            after = listing.entries[-1].key if listing.entries else after
            limits.append((after, listing.revision))
        self._at, self._pages = limits[0][1], tuple(limits)
        return found

    def _take_in(self, change: KeyChange) -> None:
        """Show a change, unless a page of the list had it already."""
        self._at = change.revision - 1
        """Others of the same transaction may follow; seen twice, they change nothing."""
        if self._pages:
            if change.revision <= self._read_at(change.key):
                return
            if change.revision > self._pages[-1][1]:
                self._pages = ()
        name = change.key[len(self.prefix) :]
        if change.value is None:
            if name in self._records:
                self._put(name, None, 0)
        elif change.revision > self.revision(name):
            entry = Entry(change.key, change.value, change.revision)
            self._put(name, self._read(name, entry), change.revision)

    def _read_at(self, key: str) -> int:
        """Return at which revision the list was read where a key is, or would be."""
        page = bisect_left(self._pages, (key, 0))
        return self._pages[min(page, len(self._pages) - 1)][1]
