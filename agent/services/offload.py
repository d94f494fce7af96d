"""Carries blocking calls off the event loop, one lane (thread) per mutating interface.

Calls of one lane run in the order they were made, so the interfaces need no locks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Lanes:
    """Named threads, made when first used."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lanes: dict[str, ThreadPoolExecutor] = {}

    async def run(self, lane: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `call(*args, **kwargs)`, run in the lane's thread.

        Once started the call runs to its end even if the waiting task is cancelled.
        """
        pool = self._lanes.get(lane)
        if pool is None:
            pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=lane)
            self._lanes[lane] = pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: call(*args, **kwargs))

    def close(self) -> None:
        """Wait for what runs, then end all threads."""
        for pool in self._lanes.values():
            pool.shutdown(wait=True)
        self._lanes.clear()
