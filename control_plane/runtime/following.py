"""Tables of one store in several processes: each process follows the writes of others, in order.

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


class Following:
    """Keeps tables equal to a store that other processes write to."""

    def __init__(self, store: Store, tables: Sequence[Followed]) -> None:
        """Follow nothing yet; create it before the tables are loaded, and `run` it afterwards."""
        self._store, self._tables = store, list[Followed]()
        self.at = store.revision()
        """Everything up to this revision is in the tables."""
        self._more = asyncio.Event()
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
                self._reach(at)

    async def reached(self, revision: int, patience_s: float) -> bool:
        """Return whether the tables reached a revision within `patience_s` seconds."""
        try:
            async with asyncio.timeout(patience_s):
                while self.at < revision:
                    await self._more.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self, changes: AsyncIterator[KeyChange]) -> None:
        now, touched = self.at, dict[Followed, None]()
        while True:
            coming = asyncio.ensure_future(anext(changes))
            try:
                await asyncio.sleep(0)
                if not coming.done():  # the last transaction has arrived completely
                    await _complete(touched)
                    self._reach(now)
                change = await coming
            finally:
                coming.cancel()
            if change.revision > now:
                await _complete(touched)
            self._reach(change.revision - 1)
            now = change.revision
            for table in self._tables:
                if table.concerns(change.key):
                    await table.follow(change)
                    touched[table] = None

    def _reach(self, revision: int) -> None:
        if revision > self.at:
            self.at = revision
            self._more.set()
            self._more = asyncio.Event()


async def _complete(touched: dict[Followed, None]) -> None:
    for table in list(touched):
        await table.complete()
    touched.clear()
