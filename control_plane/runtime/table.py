"""Records of one kind: durable in the store, all in memory, changed one writer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from control_plane.runtime.locks import Locks
from control_plane.runtime.readable import (
    PART,
    Item,
    Loaded,
    OnChange,
    Readable,
    T,
    for_each,
    ignore,
)
from control_plane.store import Delete, Entry, KeyChange, Operation, Put, Store
from control_plane.store.bulk import PAGE, pages
from control_plane.store.outcomes import Slots, WriteAttempt
from control_plane.store.records import encode
from wire.errors import Busy, Conflict, TwineError, UnknownOutcome

__all__ = ["PAGE", "PART", "Item", "Loaded", "OnChange", "Table", "for_each", "ignore", "pages"]


Checkpoint = Callable[[], Awaitable[None]]


async def ignore_turns() -> None:
    """Do nothing: for tables of few records, which need no checkpoint."""


class Table(Readable[T]):
    """A write-through copy of everything below a prefix.

    Readers and listeners see a change only once it is durable. Every
    write carries the revision that it was based on, so it fails instead of overwriting another
    writer's change; the table then reads that change.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        kind: type[T],
        noun: str,
        *,
        read: Callable[[str, Entry], T] | None = None,
        history: int = 0,
        checkpoint: Checkpoint = ignore_turns,
        writer: str = "",
    ) -> None:
        """See `Readable`; `checkpoint` is that of the runtime.

        `writer` is the name of this process where others write to the same store.
        """
        super().__init__(store, prefix, kind, noun, read=read, history=history)
        self._checkpoint = checkpoint
        self.locks = Locks()
        self._slots = Slots(store, prefix.rstrip("/"), writer)
        self.is_followed = False
        """Whether `follow` is called for changes of other processes, and later for own changes."""
        self._doubtful: dict[str, WriteAttempt] = {}
        """Name → its last write, whose outcome is unknown."""
        self._deleted: dict[str, int] = {}
        """Deleted name → the revision of its deletion, until the watch has passed that."""

    async def load(self) -> None:
        """Read everything; listeners are called once each page is in the table.

        After each page the event loop gets its turn.
        """
        async for page in pages(self.store, self.prefix):
            self._add_page(page)
            await asyncio.sleep(0)
        self.start_revisions()

    # -- following what other processes write

    def concerns(self, key: str) -> bool:
        """Return whether a key belongs to this table."""
        return key.startswith(self.prefix)

    async def follow(self, change: KeyChange) -> None:
        """Apply a change of the store, unless this process wrote or read a newer one.

        If the record's lock is held, this process is writing it: the change waits for the lock.
        """
        name = change.key.removeprefix(self.prefix)
        if self.locks.is_held(name):
            async with self.lock(name):
                self._apply(name, change)
        else:
            self._apply(name, change)

    async def complete(self) -> None:
        """Do nothing: `follow` has applied each change."""

    def _apply(self, name: str, change: KeyChange) -> None:
        deleted_at = self._deleted.get(name, 0)
        if deleted_at and change.revision >= deleted_at:
            del self._deleted[name]
        if change.revision <= max(deleted_at, self.revision(name)):
            return
        if change.value is None:
            if name in self._records:
                self._put(name, None, change.revision)
                self._deleted.pop(name, None)
            return
        entry = Entry(change.key, change.value, change.revision)
        self._put(name, self._read(name, entry), change.revision)

    async def list_again(self) -> None:
        """Bring everything up to the store's state, after its history was compacted."""
        stored = set[str]()
        async for page in pages(self.store, self.prefix):
            for entry in page:
                stored.add(entry.key.removeprefix(self.prefix))
                await self.follow(KeyChange(entry.key, entry.value, entry.revision))
        for name in [name for name in self._records if name not in stored]:
            async with self.lock(name):
                await self._read_again(name)
        self._deleted.clear()

    # -- writing

    def lock(self, *names: str) -> _HeldLocks:
        """Hold the locks of these records, from reading to `commit`.

        They are taken in one order by all actors, so there is no deadlock.
        """
        return _HeldLocks(self, names if len(names) == 1 else sorted(set(names)))

    async def resolve_doubtful(self, names: Collection[str]) -> None:
        """Read these records again where the outcome of their last write is unknown."""
        if self._doubtful:
            await self._refresh(self._doubtful.keys() & set(names))

    async def settle(self) -> None:
        """Read all records again whose last write has an unknown outcome."""
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
        operations, expected = list[Operation](), dict[str, int]()
        for name, record in changes.items():
            compared, written = await self._written(name, record)
            operations += written
            expected |= compared
        expected |= compare or {}
        attempt = WriteAttempt(self._slots, expected, [*operations, *also])
        try:
            revision = await attempt.make()
            await self._checkpoint()  # many transactions may end in one turn
        except UnknownOutcome:
            revision = await self._resolve(changes, attempt)
        except Conflict:
            self._doubtful.update(dict.fromkeys(changes, attempt))
            await self._refresh(changes)
            raise
        except BaseException:
            self._doubtful.update(dict.fromkeys(changes, attempt))
            raise
        for name, record in changes.items():
            if record is None and self.is_followed:
                self._deleted[name] = revision
            self._put(name, record, revision)

    async def _resolve(self, names: Collection[str], attempt: WriteAttempt) -> int:
        """Return the revision of an unanswered write, or raise `Busy` if it was not made.

        Raises `UnknownOutcome` if the store does not know; then the next actor that
        locks one of these records asks the store first.
        """
        self._doubtful.update(dict.fromkeys(names, attempt))
        try:
            revision = await attempt.outcome()
        except TwineError as e:
            raise UnknownOutcome(
                f"unknown whether {self._noun} {', '.join(sorted(names))} was written: {e}",
                hint="read the object before you send the change again",
            ) from e
        if not revision:
            await self._refresh(names)
            raise Busy(
                f"cannot write {self._noun} {', '.join(sorted(names))}: the store failed",
                hint="nothing was changed; the request may be sent again",
            )
        for name in names:
            self._doubtful.pop(name, None)
        return revision

    async def commit_in_parts(self, changes: Mapping[str, T | None]) -> None:
        """Store many records in transactions of `PART` each; the caller has the locks.

        Raises the first error once all have ended; other parts may be stored then.
        """
        names = list(changes)
        parts = (names[first : first + PART] for first in range(0, len(names), PART))
        commits = (self.commit_many({name: changes[name] for name in part}) for part in parts)
        for outcome in await asyncio.gather(*commits, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def update(self, name: str, change: Callable[[T], T]) -> T:
        """Change a record and return it as stored; `NotFound` if there is none."""
        return (await self.update_many([name], change))[0]

    async def update_many(self, names: Collection[str], change: Callable[[T], T]) -> list[T]:
        """Change several records in one transaction; an error of `change` aborts all of it."""
        async with self.lock(*names):
            after = {name: change(self.get(name)) for name in names}
            different = {n: r for n, r in after.items() if r != self._records[n]}
            if different:
                await self.commit_many(different)
            return list(after.values())

    async def _refresh(self, names: Collection[str]) -> None:
        """Read records again after a write with unknown outcome or another writer's change."""
        for name in sorted(names):
            if (attempt := self._doubtful.get(name)) is not None:
                await attempt.outcome()
            await self._read_again(name)
            self._doubtful.pop(name, None)

    async def _read_again(self, name: str) -> None:
        """Bring one record up to the store's state."""
        entry = await self.store.get(self.prefix + name)
        if entry is None:
            if name in self._records:
                self._put(name, None, 0)
        elif entry.revision != self.revision(name):
            self._put(name, self._read(name, entry), entry.revision)

    async def _written(self, name: str, record: T | None) -> tuple[dict[str, int], list[Operation]]:
        """Return the comparisons and the operations of a record's write."""
        key = self.prefix + name
        return self.expect([name]), [Delete(key) if record is None else Put(key, encode(record))]


class _HeldLocks:
    """Holds the locks of some records of a table during an `async with` block."""

    __slots__ = ("_held", "_names", "_table")

    def __init__(self, table: Table[Any], names: Sequence[str]) -> None:
        self._table, self._names, self._held = table, names, 0

    async def __aenter__(self) -> None:
        try:
            for name in self._names:
                await self._table.locks.acquire(name)
                self._held += 1
            await self._table.resolve_doubtful(self._names)
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        for name in self._names[: self._held]:
            self._table.locks.release(name)
