"""The revision up to which a process has followed a store, and waiting for it to rise."""

from __future__ import annotations

import asyncio


class FollowedRevision:
    """Everything up to the revision `at` was followed."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._advanced = asyncio.Event()

    async def wait_reached(self, revision: int, timeout_s: float) -> bool:
        """Return whether a revision is reached within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.at < revision:
                    await self._advanced.wait()
        except TimeoutError:
            return False
        return True

    def advance(self, revision: int) -> None:
        """Raise `at` to a revision, unless it is newer already."""
        if revision > self.at:
            self.at = revision
            self._advanced.set()
            self._advanced = asyncio.Event()
