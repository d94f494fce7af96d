"""Reads entries that may be damaged, and deletes any number of entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from control_plane.store import Delete, Entry, Operation, Store
from control_plane.store.bounds import ROWS_MAX

T = TypeVar("T")


def decode_if_intact(entry: Entry, kind: type[T]) -> T | None:
    """Return the value of an entry; None if it is damaged: its owner writes it again."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except msgspec.DecodeError:
        return None


async def delete_all(store: Store, keys: Sequence[str]) -> None:
    """Delete any number of entries, in transactions that the store accepts."""
    for first in range(0, len(keys), ROWS_MAX):
        deletions: list[Operation] = [Delete(key) for key in keys[first : first + ROWS_MAX]]
        await store.txn({}, deletions)
