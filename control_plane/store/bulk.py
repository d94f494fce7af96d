"""Writes very many keys: for an imported inventory or a generated region."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import islice

from control_plane.store.bounds import ROWS_MAX
from control_plane.store.protocol import Put, Store

_BATCH = ROWS_MAX
"""Keys of one transaction."""
_IN_FLIGHT = 20
"""Transactions at once: half are prepared while the others are written; more only use memory."""


async def put_all(store: Store, items: Iterable[tuple[str, bytes]]) -> int:
    """Write all items, overwriting existing ones; return how many.

    This takes many transactions. After a crash a part of the items is there: write
    all of them again.
    """
    total = 0
    waiting: set[asyncio.Task[int]] = set()
    left = iter(items)
    async with asyncio.TaskGroup() as group:
        while batch := [Put(key, value) for key, value in islice(left, _BATCH)]:
            total += len(batch)
            waiting.add(group.create_task(store.txn({}, batch)))
            if len(waiting) == _IN_FLIGHT:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)
    return total
