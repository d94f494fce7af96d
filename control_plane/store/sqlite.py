"""The durable store: SQLite in WAL mode with full sync, one writer thread, group commit.

All transactions that wait while one is being synced to disk share the next sync; that
gives 80,000 writes a second where single ones would give 500 (docs/adr/0006). `statements`
has the SQL, `checkpoints` keeps long writes to the file out of the commits.
An exclusive lock on the folder keeps a second process out; the epoch rises with each start.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from agent.errors import Busy, ConfigError, Conflict
from control_plane.store import statements
from control_plane.store.checkpoints import Checkpoints
from control_plane.store.feed import HISTORY, Feed
from control_plane.store.protocol import (
    LAST,
    Change,
    Entry,
    Listing,
    Operation,
    Put,
    check_transaction,
)

_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "busy_timeout=5000",
    "wal_autocheckpoint=0",
)
_SWITCH_S = 0.0001
"""The writer waits so long for the event loop to give up Python's lock, for the whole
process. At Python's 5 ms it may wait for ever: a loop that computes, but looks at its
sockets every 2 ms, gives the lock up and has it back before the writer wakes (measured:
0 transactions in 2 s, 8,700 a second with this)."""
_GROUP_MAX = 512
"""Transactions that share one sync at most, so that the first does not wait too long."""
_ROWS_MAX = 4096
"""Rows that do."""

T = TypeVar("T")


@dataclass(slots=True)
class _Write:
    """One transaction on its way through the writer thread."""

    compare: Mapping[str, int]
    operations: Sequence[Operation]
    done: asyncio.Future[int]
    changes: list[Change] = field(default_factory=list)
    error: Exception | None = None
    revision: int = 0


class SqliteStore:
    """Implements `control_plane.store.Store` in the folder `path`."""

    def __init__(self, path: Path, history: int = HISTORY) -> None:
        """Open nothing yet."""
        self._path = path
        self._history = history
        self._lock = -1
        self._epoch = 0
        self._revision = 0
        self._trimmed = 0
        self._feed: Feed | None = None
        self._outbox: list[_Write] = []
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reader: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        """Lock the folder, recover, raise the epoch."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _take_lock(self._path / "lock")
        try:
            writer = self._connect()
            self._recover(writer)
        except sqlite3.Error as e:
            os.close(self._lock)
            raise ConfigError(
                f"cannot open {self._path / 'twine.db'}: {e}",
                hint="is the disk full or the file damaged? restore the last backup",
            ) from e
        except BaseException:
            os.close(self._lock)
            raise
        self._checkpoints = Checkpoints(self._connect())
        self._readers = ThreadPoolExecutor(1, "store-reader")
        self._reader = self._connect()
        self._thread = threading.Thread(target=self._write_loop, args=(writer,), name="store")
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit what was accepted, then let go of the folder."""
        self._send()
        self._queue.put(None)
        assert self._thread
        assert self._readers
        assert self._reader
        await asyncio.to_thread(self._thread.join)
        self._checkpoints.close()
        self._readers.shutdown()
        self._reader.close()
        os.close(self._lock)
        self._thread = self._readers = self._reader = None

    def epoch(self) -> int:
        """Return the term that began when the store was opened."""
        return self._epoch

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        return await self._read(lambda db: statements.find(db, key))

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key, from one snapshot of the database."""
        begin = max(prefix, after and after + "\0")  # the first that can follow
        return Listing(
            *await self._read(lambda db: statements.read_range(db, begin, prefix + LAST, limit))
        )

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once it is on disk, or raise `Conflict`."""
        if self._thread is None:
            raise Busy("cannot use the store: it is not open")
        check_transaction(compare, operations)
        done: asyncio.Future[int] = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._send)
        self._outbox.append(_Write(compare, operations, done))
        return await done

    def _send(self) -> None:
        """Hand the writer what one turn of the loop wrote: to wake it costs a switch of threads."""
        if self._outbox:
            self._queue.put(self._outbox)
            self._outbox = []

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Change]:
        """Yield changes after a revision."""
        assert self._feed
        return self._feed.follow(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Forget the history up to a revision, in memory and on disk."""
        assert self._feed
        self._feed.compact(revision)
        await self.txn({}, [])

    # -- start

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path / "twine.db", isolation_level=None, check_same_thread=False
        )
        try:
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _recover(self, writer: sqlite3.Connection) -> None:
        meta = statements.read_meta(writer)
        self._revision = statements.revision(writer)
        self._epoch = meta.get("epoch", 0) + 1
        self._trimmed = meta.get("compacted", 0)
        statements.write_meta(
            writer, schema=statements.SCHEMA, epoch=self._epoch, revision=self._revision
        )
        self._feed = Feed(self._revision, self._trimmed, self._history)
        log = statements.read_log(writer, self._trimmed)
        self._feed.extend(list(changes) for _, changes in groupby(log, lambda c: c.revision))

    # -- reading

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None or self._reader is None:
            raise Busy("cannot use the store: it is not open")
        try:
            return await self._loop.run_in_executor(self._readers, read, self._reader)
        except sqlite3.Error as e:
            raise _failed(e) from e

    # -- the writer thread

    def _write_loop(self, connection: sqlite3.Connection) -> None:
        """Take what waits, write it as one SQLite transaction, answer all."""
        waiting: deque[_Write] = deque()
        stop = False
        while waiting or not stop:
            try:
                while not stop:
                    item = self._queue.get(block=not waiting)
                    if item is None:
                        stop = True
                    else:
                        waiting.extend(item)
            except queue.Empty:
                pass
            group: list[_Write] = []
            rows = 0
            while waiting and len(group) < _GROUP_MAX and rows < _ROWS_MAX:
                rows += len(waiting[0].operations)
                group.append(waiting.popleft())
            if group:
                changes = self._commit(connection, group)
                self._loop.call_soon_threadsafe(self._answer, group)
                size = sum(len(change.value) for change in changes if change.value)
                self._checkpoints.wrote(connection, len(changes), size)
        connection.close()

    def _commit(self, connection: sqlite3.Connection, group: list[_Write]) -> list[Change]:
        """Write a group; if the disk refuses, all of it fails and nothing changed."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            compared = {key for write in group for key in write.compare}
            revisions = statements.find_revisions(connection, compared)
            changes = _settle(group, revisions, self._revision)
            if changes:
                statements.write(connection, changes)
            self._trim(connection)
            connection.execute("COMMIT")
        except Exception as e:  # the thread must live; whoever wrote is told
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in group:
                write.error = _failed(e) if isinstance(e, sqlite3.Error) else e
            return []
        if changes:
            self._revision = changes[-1].revision
        return changes

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Drop from the log what the feed has forgotten."""
        assert self._feed
        compacted = self._feed.compacted
        if compacted > self._trimmed:
            statements.trim(connection, compacted)
            self._trimmed = compacted

    def _answer(self, group: list[_Write]) -> None:
        """Back on the loop: show the changes to watchers, then wake the writers."""
        assert self._feed
        self._feed.extend(write.changes for write in group if write.changes and not write.error)
        for write in group:
            if write.done.done():
                continue
            if write.error is not None:
                write.done.set_exception(write.error)
            else:
                write.done.set_result(write.revision)


def _settle(group: list[_Write], revisions: dict[str, int], revision: int) -> list[Change]:
    """Decide each transaction of a group after the ones before it; return all their changes.

    `revisions` holds those of the compared keys before the group; 0 or absent: no such key.
    """
    changes: list[Change] = []
    for write in group:
        for key, expected in write.compare.items():
            found = revisions.get(key, 0)
            if found != expected:
                write.error = Conflict(
                    f"cannot write {key}: it is at revision {found}, not {expected} as expected"
                )
                break
        else:
            revision += 1 if write.operations else 0
            write.revision = revision
            for operation in write.operations:
                value = operation.value if isinstance(operation, Put) else None
                revisions[operation.key] = 0 if value is None else revision
                write.changes.append(Change(operation.key, value, revision))
            changes += write.changes
    return changes


def _failed(error: sqlite3.Error) -> Busy:
    return Busy(
        f"the store cannot be used: {error}",
        hint="is the disk full? nothing was changed; the request may be sent again",
    )


def _take_lock(path: Path) -> int:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(lock)
        raise Busy(
            f"cannot open the store in {path.parent}: another control plane is running on it",
            hint="stop the other process, or give this one a state folder of its own",
        ) from e
    return lock
