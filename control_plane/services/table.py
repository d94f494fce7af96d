"""Records of one kind: durable in the store, all in memory, changed one writer at a time."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from agent.errors import Conflict, NotFound
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.store import Compacted, Delete, Entry, Operation, Put, Store
from control_plane.store.records import decode, encode

T = TypeVar("T", MachineRecord, EntitlementRecord, JobRecord)
Heard = Callable[[str, T | None, T | None], None]
Loaded = Callable[[Mapping[str, T]], None]
Item = tuple[str, T | None, int]
"""A name, its record or None for one that is gone, and the revision of the table."""

PAGE = 1000
"""Records that are read before others get their turn: some 5 ms of work."""
_LIFE = 32
"""Bits of a table's revision that count changes; those above are the store's epoch."""


class Table(Generic[T]):
    """A write-through copy of everything below a prefix.

    A change is visible to readers and listeners once it is durable, never before. Every
    write carries the revision that it was based on, so another writer on the same store
    makes it fail instead of being overwritten; what that writer wrote is then read.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        kind: type[T],
        word: str,
        *,
        read: Callable[[str, Entry], T] | None = None,
        history: int = 0,
    ) -> None:
        """Load nothing yet; `word` names the kind in messages.

        `read` decodes an entry, given its name; `history` is the number of changes that
        `watch` can go back.
        """
        self.store = store
        self.prefix = prefix
        self.latest = 0
        """Rises with each change; `watch` goes on from it."""
        self._word = word
        self._read: Callable[[str, Entry], T] = read or (
            lambda _, entry: decode(entry.value, kind, entry.key)
        )
        self._records: dict[str, T] = {}
        self._revisions: dict[str, int] = {}
        self._names: tuple[str, ...] | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._doubtful: set[str] = set()
        """Names of which a write ended in a way that does not say whether it was made."""
        self._listeners: list[Heard[T]] = []
        self._loaders: list[Loaded[T]] = []
        self._history: deque[Item[T]] = deque(maxlen=history)
        self._more: asyncio.Event | None = None

    async def load(self, after_page: Callable[[], None] | None = None) -> None:
        """Read everything; listeners are told once a page of it is in the table.

        The loop gets its turn after each page, and so does `after_page`.
        """
        start, read = len(self.prefix), self._read
        async for page in pages(self.store, self.prefix):
            records: dict[str, T] = {}
            for entry in page:
                name = entry.key[start:]
                records[name] = read(name, entry)
                self._revisions[name] = entry.revision
            self._records.update(records)
            for loaded in self._loaders:
                loaded(records)
            if after_page is not None:
                after_page()
            await asyncio.sleep(0)
        self._names = None
        self.begin()

    def begin(self) -> None:
        """Count changes from here on, above all that other lives of this table counted."""
        self.latest = self.store.epoch() << _LIFE

    # -- reading

    def find(self, name: str) -> T | None:
        """Return the record, if there is one."""
        return self._records.get(name)

    def get(self, name: str) -> T:
        """Return the record, or raise `NotFound`."""
        record = self._records.get(name)
        if record is None:
            raise NotFound(f"there is no {self._word} {name!r}")
        return record

    def names(self) -> tuple[str, ...]:
        """Return all names, in order."""
        if self._names is None:
            self._names = tuple(sorted(self._records))
        return self._names

    def after(self, name: str) -> Iterator[str]:
        """Yield the names that come after this one, in order."""
        names = self.names()
        return islice(names, bisect_right(names, name), None)

    def __iter__(self) -> Iterator[str]:
        """Yield all names, in order."""
        return iter(self.names())

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a record."""
        return name in self._records

    def records(self) -> list[T]:
        """Return all records, by name."""
        return [self._records[name] for name in self.names()]

    def values(self) -> ValuesView[T]:
        """Return all records as a view, in no order."""
        return self._records.values()

    def revision(self, name: str) -> int:
        """Return the store revision of a record, 0 if there is none."""
        return self._revisions.get(name, 0)

    def expect(self, names: Sequence[str]) -> dict[str, int]:
        """Return comparisons that hold while these records stay as they are."""
        return {self.prefix + name: self.revision(name) for name in names}

    # -- being told

    def listen(self, heard: Heard[T], loaded: Loaded[T] | None = None) -> None:
        """Call `heard(name, before, after)` after each change.

        For what `load` reads, `loaded(records)` is called with many at once, if it is given.
        """
        self._listeners.append(heard)
        self._loaders.append(loaded or tell_each(heard))

    def changes(self, after: int, limit: int | None = None) -> list[Item[T]]:
        """Return the changes after a revision of this table, oldest first.

        Raises `Compacted` if they are not kept any more: list again.
        """
        missed = self.latest - after
        if not 0 <= missed <= len(self._history):
            raise Compacted(
                f"cannot tell the changes of {self.prefix} after {after}: known are those from"
                f" {self.latest - len(self._history)} to {self.latest}",
                hint="list again, and go on from the revision of the list",
            )
        start = len(self._history) - missed
        return list(islice(self._history, start, None if limit is None else start + limit))

    async def changed(self, after: int) -> None:
        """Return once there is a change after a revision, or never was that revision."""
        while after == self.latest:
            if self._more is None:
                self._more = asyncio.Event()
            await self._more.wait()

    async def watch(self, after: int) -> AsyncIterator[Item[T]]:
        """Yield each change after a revision, for ever, or raise `Compacted`."""
        while True:
            for change in self.changes(after):
                after = change[2]
                yield change
            await self.changed(after)

    # -- writing

    @asynccontextmanager
    async def lock(self, *names: str) -> AsyncIterator[None]:
        """Hold the locks of these records, from reading to `commit`.

        They are taken in one order by everybody, so nobody waits in a circle. Locks exist
        only while somebody holds or awaits them.
        """
        async with AsyncExitStack() as stack:
            for name in sorted(set(names)):
                lock = self._locks.get(name)
                if lock is None:
                    lock = self._locks[name] = asyncio.Lock()
                await stack.enter_async_context(lock)
            if self._doubtful:
                await self._refresh(self._doubtful.intersection(names))
            yield

    async def settle(self) -> None:
        """Read again what a write may have changed that did not say whether it was made."""
        if self._doubtful:
            async with self.lock(*self._doubtful):
                pass

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
        await self.commit_many({name: record}, compare, also)

    async def commit_many(
        self,
        changes: Mapping[str, T | None],
        compare: Mapping[str, int] | None = None,
        also: Sequence[Operation] = (),
    ) -> None:
        """Store several records in one transaction, all or none; the caller has the locks."""
        operations: list[Operation] = [
            Delete(self.prefix + name)
            if record is None
            else Put(self.prefix + name, encode(record))
            for name, record in changes.items()
        ]
        expected = {**self.expect(list(changes)), **(compare or {})}
        try:
            revision = await self.store.txn(expected, [*operations, *also])
        except Conflict:
            self._doubtful |= changes.keys()
            await self._refresh(changes)
            raise
        except BaseException:
            self._doubtful |= changes.keys()
            raise
        for name, record in changes.items():
            self._put(name, record, revision)

    async def update(self, name: str, change: Callable[[T], T]) -> T:
        """Change a record in place; returns it as stored. `NotFound` if there is none."""
        return (await self.update_many([name], change))[0]

    async def update_many(self, names: Collection[str], change: Callable[[T], T]) -> list[T]:
        """Change several records in one transaction; what `change` raises stops all of it."""
        async with self.lock(*names):
            after = {name: change(self.get(name)) for name in names}
            different = {n: r for n, r in after.items() if r != self._records[n]}
            if different:
                await self.commit_many(different)
            return list(after.values())

    async def _refresh(self, names: Collection[str]) -> None:
        """Read records again whose last write is in doubt, or that another writer changed."""
        for name in sorted(names):
            entry = await self.store.get(self.prefix + name)
            self._doubtful.discard(name)
            if entry is None:
                if name in self._records:
                    self._put(name, None, 0)
            elif entry.revision != self.revision(name):
                self._put(name, self._read(name, entry), entry.revision)

    def _put(self, name: str, record: T | None, revision: int) -> None:
        before = self._records.get(name)
        if record is None:
            self._records.pop(name, None)
            self._revisions.pop(name, None)
        else:
            self._records[name] = record
            self._revisions[name] = revision
        if (before is None) is not (record is None):
            self._names = None
        self.latest += 1
        if self._history.maxlen:
            self._history.append((name, record, self.latest))
        if self._more is not None:
            self._more.set()
            self._more = None
        for heard in self._listeners:
            heard(name, before, record)


def tell_each(heard: Callable[[str, None, T], None]) -> Loaded[T]:
    """Return what tells a listener of each of many records."""

    def loaded(records: Mapping[str, T]) -> None:
        for name, record in records.items():
            heard(name, None, record)

    return loaded


def ignore(_: Mapping[str, object]) -> None:
    """Listen to nothing that is read at the start: a service that looks at it all once it runs."""


async def pages(store: Store, prefix: str) -> AsyncIterator[tuple[Entry, ...]]:
    """Yield everything below a prefix, a thousand entries at a time.

    The next page is read while the caller is at the present one.
    """
    reading = asyncio.ensure_future(store.list_prefix(prefix, "", PAGE))
    try:
        while True:
            entries = (await reading).entries
            full = len(entries) == PAGE
            if full:
                reading = asyncio.ensure_future(store.list_prefix(prefix, entries[-1].key, PAGE))
                await asyncio.sleep(0)  # until then a task has not begun
            if entries:
                yield entries
            if not full:
                return
    finally:
        reading.cancel()
