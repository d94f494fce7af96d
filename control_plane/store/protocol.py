"""The interface of a store, and its values.

A store is a map from keys to bytes with one revision counter. Each transaction with a
change raises it by one, and every entry has the revision of its last write.
SQLite and etcd both provide that (docs/adr/0006-one-store-protocol-sqlite-first.md).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec

from control_plane.store.write_times import WriteTimes
from wire.errors import Conflict, TwineError

LAST = "\U0010ffff"
"""Sorts after every character that a key may hold: `prefix + LAST` ends a prefix."""
OPERATIONS_MAX = 1 << 20
"""Operations of one transaction."""


class Compacted(TwineError):
    """The history that a watch needs was dropped: list again, and watch from there."""

    code = "compacted"
    status = 410


class Entry(msgspec.Struct, frozen=True, gc=False):
    """The present value of a key. A start makes a million: structs take a third of the time."""

    key: str
    value: bytes
    revision: int
    """The transaction that wrote it last; 0 never occurs and means "must not exist"."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Keys below a prefix, in order, all at one revision.

    All keys, or one page of them: the revision is that of the page.
    """

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; succeeds also if it does not exist."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class KeyChange:
    """What one transaction did to one key."""

    key: str
    value: bytes | None
    """None: it was removed."""
    revision: int


def check_transaction(compare: Mapping[str, int], operations: Sequence[Operation]) -> None:
    """Raise `ValueError` for transactions that no engine accepts: a bug of the caller."""
    keys = [operation.key for operation in operations]
    if len(set(keys)) != len(keys):
        raise ValueError(f"a transaction may touch each key once: {keys}")
    if len(keys) > OPERATIONS_MAX:
        raise ValueError(f"a transaction has at most {OPERATIONS_MAX} operations: {len(keys)}")
    for key in (*keys, *compare):
        if not key.isprintable():
            raise ValueError(f"a key is printable text: {key!r}")


def stale_error(key: str, expected: int, found: int) -> Conflict:
    """Return the error of a transaction that compared a key with another revision."""
    return Conflict(f"cannot write {key}: it is at revision {found}, not {expected} as expected")


class Store(Protocol):
    """The interface of every engine. `async with` opens it, and opening it again is a restart."""

    @property
    def times(self) -> WriteTimes:
        """Return how long transactions take."""
        ...

    async def __aenter__(self) -> Self:
        """Take sole ownership, recover, and raise the epoch; `Busy` if another has it."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Finish accepted writes, and release ownership."""
        ...

    def epoch(self) -> int:
        """Return the leadership term: it rises by one each time the store is opened."""
        ...

    def revision(self) -> int:
        """Return the newest revision known to be on disk."""
        ...

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key, if there is one."""
        ...

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys that start with `prefix` and come after `after`, in order.

        At most `limit` of them (None: all), and all at one revision. To read a range that is too
        large for one list: read page after page, each after the last key of the one
        before, until a page is short; then watch from the revision of the *first* page. The
        watch repeats changes between two pages, and a reader that keeps the newest
        revision of each key is correct.
        """
        ...

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Carry out all operations if all compared keys have the expected revisions.

        0 stands for "must not exist". Returns the new revision once the change would
        survive a crash, or raises `Conflict` with nothing changed. At most one operation
        per key. After `UnknownOutcome` or cancellation the transaction may have succeeded, have
        failed, or still succeed: `outcomes` finds out. Any other `TwineError`: nothing changed.
        """
        ...

    def failure(self) -> str:
        """Return why this engine can never write again; empty: it can, or may recover."""
        ...

    async def wait_failed(self) -> None:
        """Never return; raise the reason once this engine can never write again."""
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield every change after `from_revision`, in order, forever.

        Raises `Compacted` when that part of the history was dropped, also later if
        the reader falls too far behind.
        """
        ...

    async def compact(self, revision: int) -> None:
        """Drop the history up to a revision; the entries themselves stay."""
        ...
