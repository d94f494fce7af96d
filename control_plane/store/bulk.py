"""Reads and writes very many keys: whole tables, an imported inventory, a generated region."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable

from control_plane.store.bounds import ROWS_MAX
from control_plane.store.protocol import Entry, Operation, Put, Store

PAGE = 1000
"""Entries that are read before other actors run: some 5 ms of work."""
_BYTES = 1 << 20
"""Bytes of one transaction, below what etcd takes (1.5 MiB)."""
_IN_FLIGHT = 20
"""Transactions at once: half are prepared while the others are written; more only use memory."""


async def pages(store: Store, prefix: str) -> AsyncIterator[tuple[Entry, ...]]:
    """Yield everything below a prefix, a thousand entries at a time.

    The next page is read while the caller processes the present one.
    """
    reading = asyncio.ensure_future(store.list_prefix(prefix, "", PAGE))
    try:
        while True:
            page = (await reading).entries
            full = len(page) == PAGE
            if full:
                reading = asyncio.ensure_future(store.list_prefix(prefix, page[-1].key, PAGE))
                await asyncio.sleep(0)  # until then a task has not begun
            if page:
                yield page
            if not full:
                return
    finally:
        reading.cancel()


async def entries(store: Store, prefix: str = "") -> AsyncIterator[Entry]:
    """Yield everything below a prefix, entry by entry; it is read page by page."""
    async for page in pages(store, prefix):
        for entry in page:
            yield entry


async def put_all(store: Store, items: Iterable[tuple[str, bytes]]) -> int:
    """Write all items, overwriting existing ones; return how many.

    This takes many transactions. After a crash a part of the items is there: write
    all of them again.
    """

    async def puts() -> AsyncIterator[Operation]:
        for key, value in items:
            yield Put(key, value)

    return await write_all(store, puts())


async def write_all(store: Store, operations: AsyncIterable[Operation]) -> int:
    """Carry out all operations in many transactions, some at once; return how many."""
    total = 0
    waiting: set[asyncio.Task[int]] = set()
    async with asyncio.TaskGroup() as group:
        async for batch in _batches(operations):
            total += len(batch)
            waiting.add(group.create_task(store.txn({}, batch)))
            if len(waiting) == _IN_FLIGHT:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(0)
    return total


async def _batches(operations: AsyncIterable[Operation]) -> AsyncIterator[list[Operation]]:
    """Yield transactions that every engine accepts."""
    batch: list[Operation] = []
    size = 0
    async for operation in operations:
        more = len(operation.value) if isinstance(operation, Put) else 0
        if len(batch) == ROWS_MAX or size + more > _BYTES:
            yield batch
            batch, size = [], 0
        batch.append(operation)
        size += more
    if batch:
        yield batch
