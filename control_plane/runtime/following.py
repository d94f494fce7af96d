"""Tables of one store in several processes: each follows the writes of the others, in order.

One watch of the whole store brings all tables up to date. So several tables together show one
moment of the past, and a reader that waits for a revision sees everything before it. A broken
watch continues where it ended. A watch whose history was compacted lists everything again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from control_plane.store import Compacted, KeyChange, Store
from control_plane.store.progress import FollowedRevision

log = logging.getLogger(__name__)


class Followed(Protocol):
    """A copy of a part of the store in memory."""

    is_followed: bool

    def concerns(self, key: str) -> bool:
        """Return whether a key belongs to this part."""
        ...

    async def follow(self, change: KeyChange) -> None:
        """Apply a change, unless a newer one was applied."""
        ...

    async def complete(self) -> None:
        """Apply what was held back until all changes of a transaction had arrived."""
        ...

    async def list_again(self) -> None:
        """Bring everything up to the store's present state."""
        ...


class Following(FollowedRevision):
    """Keeps tables equal to a store that other processes write to."""

    def __init__(self, store: Store, tables: Sequence[Followed]) -> None:
        """Follow nothing yet; create it before the tables are loaded, and `run` it afterwards."""
        super().__init__(store.revision())
        self._store, self._tables = store, list[Followed]()
        for table in tables:
            self.add(table)

    def add(self, table: Followed) -> None:
        """Follow one more table; called before it is loaded."""
        table.is_followed = True
        self._tables.append(table)

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                await self._follow(self._store.watch("", self.at))
            except Compacted as e:
                log.warning("tables are listed again", extra={"reason": str(e)})
                at = self._store.revision()
                for table in self._tables:
                    await table.list_again()
                self.advance(at)

    async def _follow(self, changes: AsyncIterator[KeyChange]) -> None:
        now, changed_tables = self.at, dict[Followed, None]()
        while True:
            next_change = asyncio.ensure_future(anext(changes))
            try:
                await asyncio.sleep(0)
                if not next_change.done():  # the last transaction has arrived completely
                    await _complete(changed_tables)
                    self.advance(now)
                change = await next_change
            finally:
                next_change.cancel()
            if change.revision > now:
                await _complete(changed_tables)
            self.advance(change.revision - 1)
            now = change.revision
            for table in self._tables:
                if table.concerns(change.key):
                    await table.follow(change)
                    changed_tables[table] = None


async def _complete(changed_tables: dict[Followed, None]) -> None:
    for table in list(changed_tables):
        await table.complete()
    changed_tables.clear()
