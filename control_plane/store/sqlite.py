"""The durable store: SQLite in WAL mode with full sync, one writer thread, group commit.

All transactions that wait while one is being synced to disk share the next sync; that
gives 80,000 writes a second where single ones would give 500 (docs/adr/0006).
An exclusive lock on the folder keeps a second process out; the epoch rises with each start.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from agent.errors import Busy, ConfigError, Conflict
from control_plane.store.feed import HISTORY, Feed
from control_plane.store.protocol import (
    LAST,
    Change,
    Entry,
    Listing,
    Operation,
    Put,
    check_operations,
)

SCHEMA = 1
_GROUP_MAX = 512
"""Transactions that share one sync at most, so that the first does not wait too long."""

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (
  key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
  revision INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
"""
_GET = "SELECT key, value, revision FROM state WHERE key = ?"
_LIST = """
SELECT '', NULL, value FROM meta WHERE name = 'revision'
UNION ALL SELECT * FROM (SELECT key, value, revision FROM state
  WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)
"""


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
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reader: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        """Lock the folder, recover, raise the epoch."""
        self._loop = asyncio.get_running_loop()
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
        self._queue.put(None)
        assert self._thread
        assert self._readers
        assert self._reader
        await asyncio.to_thread(self._thread.join)
        self._readers.shutdown()
        self._reader.close()
        os.close(self._lock)
        self._thread = self._readers = self._reader = None

    def epoch(self) -> int:
        """Return the term that began when the store was opened."""
        return self._epoch

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        rows = await self._read(_GET, (key,))
        return Entry(*rows[0]) if rows else None

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key, from one snapshot of the database."""
        begin = max(prefix, after and after + "\0")  # the first that can follow
        values = (begin, prefix + LAST, -1 if limit is None else limit)
        (_, _, revision), *rows = await self._read(_LIST, values)
        return Listing(revision=revision, entries=tuple(Entry(*row) for row in rows))

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once it is on disk, or raise `Conflict`."""
        if self._thread is None:
            raise Busy("cannot use the store: it is not open")
        check_operations(operations)
        done: asyncio.Future[int] = self._loop.create_future()
        self._queue.put(_Write(compare, operations, done))
        return await done

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
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
                connection.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _recover(self, writer: sqlite3.Connection) -> None:
        writer.executescript(_TABLES)
        meta = dict(writer.execute("SELECT name, value FROM meta"))
        if meta.get("schema", SCHEMA) > SCHEMA:
            raise ConfigError(
                f"cannot open {self._path}: its schema {meta['schema']} is newer than {SCHEMA}",
                hint="run the release that wrote it",
            )
        self._epoch = meta.get("epoch", 0) + 1
        self._revision = meta.get("revision", 0)
        compacted = meta.get("compacted", 0)
        values = {"schema": SCHEMA, "epoch": self._epoch, "revision": self._revision}
        writer.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))
        self._feed = Feed(self._revision, compacted, self._history)
        batch: list[Change] = []
        for revision, key, value in writer.execute(
            "SELECT revision, key, value FROM log WHERE revision > ? ORDER BY revision",
            (compacted,),
        ):
            if batch and batch[0].revision != revision:
                self._feed.append(batch[0].revision, batch)
                batch = []
            batch.append(Change(key, value, revision))
        if batch:
            self._feed.append(batch[0].revision, batch)

    # -- reading

    async def _read(self, sql: str, values: tuple[str | int, ...]) -> list[tuple[str, bytes, int]]:
        if self._readers is None or self._reader is None:
            raise Busy("cannot use the store: it is not open")
        reader = self._reader
        try:
            return await self._loop.run_in_executor(
                self._readers, lambda: reader.execute(sql, values).fetchall()
            )
        except sqlite3.Error as e:
            raise _failed(e) from e

    # -- the writer thread

    def _write_loop(self, connection: sqlite3.Connection) -> None:
        """Take what waits, write it as one SQLite transaction, answer all."""
        stop = False
        while not stop:
            group: list[_Write] = []
            item = self._queue.get()
            while item is not None:
                group.append(item)
                if len(group) == _GROUP_MAX:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            stop = item is None
            if group:
                self._commit(connection, group)
                self._loop.call_soon_threadsafe(self._answer, group)
        connection.close()

    def _commit(self, connection: sqlite3.Connection, group: list[_Write]) -> None:
        """Write a group; if the disk refuses, all of it fails and nothing changed."""
        revision = self._revision
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write in group:
                revision = _apply(connection, write, revision)
            connection.execute("UPDATE meta SET value = ? WHERE name = 'revision'", (revision,))
            self._trim(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as e:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in group:
                write.error = _failed(e)
            return
        self._revision = revision

    def _trim(self, connection: sqlite3.Connection) -> None:
        """Drop from the log what the feed has forgotten."""
        assert self._feed
        compacted = self._feed.compacted
        if compacted > self._trimmed:
            self._trimmed = compacted
            connection.execute("DELETE FROM log WHERE revision <= ?", (compacted,))
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('compacted', ?)", (compacted,))

    def _answer(self, group: list[_Write]) -> None:
        """Back on the loop: show the changes to watchers, then wake the writers."""
        assert self._feed
        for write in group:
            if write.error is None and write.changes:
                self._feed.append(write.revision, write.changes)
            if write.done.done():
                continue
            if write.error is not None:
                write.done.set_exception(write.error)
            else:
                write.done.set_result(write.revision)


def _apply(connection: sqlite3.Connection, write: _Write, revision: int) -> int:
    """Carry out one transaction inside the group's; return the revision after it."""
    for key, expected in write.compare.items():
        row = connection.execute("SELECT revision FROM state WHERE key = ?", (key,)).fetchone()
        found = row[0] if row else 0
        if found != expected:
            write.error = Conflict(
                f"cannot write {key}: it is at revision {found}, not {expected} as expected"
            )
            return revision
    write.revision = revision
    if not write.operations:
        return revision
    write.revision = revision = revision + 1
    for operation in write.operations:
        key, value = operation.key, operation.value if isinstance(operation, Put) else None
        if value is None:
            connection.execute("DELETE FROM state WHERE key = ?", (key,))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (key, value, revision)
            )
        connection.execute("INSERT INTO log VALUES (?, ?, ?)", (revision, key, value))
        write.changes.append(Change(key, value, revision))
    return revision


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
