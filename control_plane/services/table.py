"""Records of one kind: durable in the store, all in memory, changed one writer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from agent.errors import NotFound
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.records import decode, encode

T = TypeVar("T", MachineRecord, EntitlementRecord, JobRecord)


class Table(Generic[T]):
    """A write-through copy of everything below a prefix.

    A change is visible to readers and listeners once it is durable, never before. Every
    write carries the revision that it was based on, so another writer on the same store
    makes it fail instead of being overwritten.
    """

    def __init__(self, store: Store, prefix: str, kind: type[T], word: str) -> None:
        """Load nothing yet; `word` names the kind in messages."""
        self._store = store
        self._prefix = prefix
        self._kind: type[T] = kind
        self._word = word
        self._records: dict[str, T] = {}
        self._revisions: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._listeners: list[Callable[[str, T | None, T | None], None]] = []

    async def load(self) -> None:
        """Read everything; listeners are told of each record."""
        listing = await self._store.list_prefix(self._prefix)
        for entry in listing.entries:
            name = entry.key.removeprefix(self._prefix)
            record = decode(entry.value, self._kind, entry.key)
            self._accept(name, record, entry.revision)

    def listen(self, heard: Callable[[str, T | None, T | None], None]) -> None:
        """Call `heard(name, before, after)` after each change."""
        self._listeners.append(heard)

    def find(self, name: str) -> T | None:
        """Return the record, if there is one."""
        return self._records.get(name)

    def get(self, name: str) -> T:
        """Return the record, or raise `NotFound`."""
        record = self._records.get(name)
        if record is None:
            raise NotFound(f"there is no {self._word} {name!r}")
        return record

    def __iter__(self) -> Iterator[str]:
        """Yield all names, in order."""
        return iter(sorted(self._records))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    def records(self) -> list[T]:
        """Return all records, by name."""
        return [self._records[name] for name in self]

    def revision(self, name: str) -> int:
        """Return the store revision of a record, 0 if there is none."""
        return self._revisions.get(name, 0)

    def expect(self, names: Sequence[str]) -> dict[str, int]:
        """Return comparisons that hold while these records stay as they are."""
        return {self._prefix + name: self.revision(name) for name in names}

    def lock(self, name: str) -> AbstractAsyncContextManager[None]:
        """Return the lock of one record; hold it from reading to `commit`."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def commit(
        self,
        name: str,
        record: T | None,
        compare: Mapping[str, int] | None = None,
        also: Sequence[Operation] = (),
    ) -> None:
        """Store a record (None: delete it) if nothing it is based on changed, else `Conflict`.

        The caller holds the record's lock.
        """
        key = self._prefix + name
        operation: Operation = Delete(key) if record is None else Put(key, encode(record))
        expected = {key: self.revision(name), **(compare or {})}
        revision = await self._store.txn(expected, [operation, *also])
        self._accept(name, record, revision)

    async def update(self, name: str, change: Callable[[T], T]) -> T:
        """Change a record in place; returns it as stored. `NotFound` if there is none."""
        async with self.lock(name):
            before = self.get(name)
            after = change(before)
            if after != before:
                await self.commit(name, after)
            return after

    def _accept(self, name: str, record: T | None, revision: int) -> None:
        before = self._records.get(name)
        if record is None:
            self._records.pop(name, None)
            self._revisions.pop(name, None)
        else:
            self._records[name] = record
            self._revisions[name] = revision
        for heard in self._listeners:
            heard(name, before, record)
