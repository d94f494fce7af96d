"""A revision that rises, and coroutines that wait for it."""

from __future__ import annotations

import asyncio


class FollowedRevision:
    """How far something has followed a store: everything up to the revision `at`."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._more = asyncio.Event()

    async def reached(self, revision: int, patience_s: float) -> bool:
        """Return whether a revision is reached within `patience_s` seconds."""
        try:
            async with asyncio.timeout(patience_s):
                while self.at < revision:
                    await self._more.wait()
        except TimeoutError:
            return False
        return True

    def reach(self, revision: int) -> None:
        """Rise to a revision, unless a newer one was reached before."""
        if revision > self.at:
            self.at = revision
            self._more.set()
            self._more = asyncio.Event()
