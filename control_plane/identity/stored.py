"""Entries that the writers of this room read even if they are damaged, and delete in any number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from control_plane.store import Delete, Entry, Operation, Store
from control_plane.store.bounds import ROWS_MAX

T = TypeVar("T")


def readable(entry: Entry, kind: type[T]) -> T | None:
    """Return the value of an entry; None for a damaged one, which its owner makes again."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.DecodeError:
        return None


async def delete_all(store: Store, keys: Sequence[str]) -> None:
    """Delete any number of entries, in transactions that the store accepts."""
    for first in range(0, len(keys), ROWS_MAX):
        gone: list[Operation] = [Delete(key) for key in keys[first : first + ROWS_MAX]]
        await store.txn({}, gone)
