"""Reading and watching records, whether this process or another writes them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, ValuesView
from itertools import islice
from typing import Generic, TypeVar

import msgspec

from control_plane.store import Compacted, Entry, Store
from control_plane.store.records import decode
from wire.errors import NotFound

T = TypeVar("T", bound=msgspec.Struct)
OnChange = Callable[[str, T | None, T | None], None]
"""Called with a name, the record before and the record after a change."""
Loaded = Callable[[Mapping[str, T]], None]
Item = tuple[str, T | None, int]
"""A name, its record (None: deleted), and the revision of the table."""

PART = 64
"""Records that are written in one transaction: with their extra operations, few enough for any
engine (`bounds.ROWS_MAX`)."""
_CHANGE_BITS = 32
"""Low bits of a table's revision: they count changes. The higher bits are the store's epoch."""


class Readable(Generic[T]):
    """All records below a prefix, in memory, with listeners for changes."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        kind: type[T],
        noun: str,
        *,
        read: Callable[[str, Entry], T] | None = None,
        history: int = 0,
    ) -> None:
        """`noun` names the kind in messages.

        `read` decodes an entry, given its name; `history` is the number of changes that
        `watch` can go back.
        """
        self.store = store
        self.prefix = prefix
        self.latest = 0
        """Rises with each change; `watch` continues from it."""
        self.set_aside: frozenset[str] = frozenset()
        """Names whose stored record is damaged: they cannot be read, nor used for new records."""
        self._noun = noun
        self._read: Callable[[str, Entry], T] = read or (
            lambda _, entry: decode(entry.value, kind, entry.key)
        )
        self._records: dict[str, T] = {}
        self._revisions: dict[str, int] = {}
        self._names: tuple[str, ...] | None = None
        self._listeners: list[OnChange[T]] = []
        self._loaders: list[Loaded[T]] = []
        self._history: deque[Item[T]] = deque(maxlen=history)
        self._change_event: asyncio.Event | None = None

    def start_revisions(self) -> None:
        """Start the table's revisions above those of earlier processes; called after loading."""
        self.latest = self.store.epoch() << _CHANGE_BITS

    def _add_page(self, entries: Sequence[Entry]) -> None:
        """Add a page of records that was read at the start."""
        start, read = len(self.prefix), self._read
        records: dict[str, T] = {}
        for entry in entries:
            name = entry.key[start:]
            records[name] = read(name, entry)
            self._revisions[name] = entry.revision
        self._records.update(records)
        self._names = None
        for loaded in self._loaders:
            loaded(records)

    # -- reading

    def find(self, name: str) -> T | None:
        """Return the record, if there is one."""
        return self._records.get(name)

    def get(self, name: str) -> T:
        """Return the record, or raise `NotFound`."""
        record = self._records.get(name)
        if record is None:
            raise NotFound(f"there is no {self._noun} {name!r}")
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
        """Return comparisons that hold while these records do not change."""
        return {self.prefix + name: self.revision(name) for name in names}

    # -- changes

    def listen(self, changed: OnChange[T], loaded: Loaded[T] | None = None) -> None:
        """Call `changed(name, before, after)` after each change.

        For records that `load` reads, `loaded(records)` is called once per page, if it is given.
        """
        self._listeners.append(changed)
        self._loaders.append(loaded or for_each(changed))

    def changes(self, after: int, limit: int | None = None) -> list[Item[T]]:
        """Return the changes after a revision of this table, oldest first.

        Raises `Compacted` if they are no longer kept: list again.
        """
        missed = self.latest - after
        if not 0 <= missed <= len(self._history):
            raise Compacted(
                f"cannot list the changes of {self.prefix} after {after}: known are those from "
                f"{self.latest - len(self._history)} to {self.latest}",
                hint="list again, and continue from the revision of the list",
            )
        start = len(self._history) - missed
        return list(islice(self._history, start, None if limit is None else start + limit))

    async def changed(self, after: int) -> None:
        """Return once the table's revision is another than `after`."""
        while after == self.latest:
            if self._change_event is None:
                self._change_event = asyncio.Event()
            await self._change_event.wait()

    async def watch(self, after: int) -> AsyncIterator[Item[T]]:
        """Yield each change after a revision, forever, or raise `Compacted`."""
        while True:
            for change in self.changes(after):
                after = change[2]
                yield change
            await self.changed(after)

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
        if self._change_event is not None:
            self._change_event.set()
            self._change_event = None
        for changed in self._listeners:
            changed(name, before, record)


def for_each(changed: Callable[[str, None, T], None]) -> Loaded[T]:
    """Return a function that calls a listener once for each of many records."""

    def loaded(records: Mapping[str, T]) -> None:
        for name, record in records.items():
            changed(name, None, record)

    return loaded


def ignore(_: Mapping[str, object]) -> None:
    """Ignore records that are read at the start: for services that read the table when they run."""
