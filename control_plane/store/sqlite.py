"""The durable store: SQLite in WAL mode with full sync, one writer thread, group commit.

All transactions that wait during a sync to disk share the next sync. That
gives 80,000 writes a second where single ones would give 500 (docs/adr/0006). `statements`
has the SQL, `writer` the thread, `checkpoints` keeps long writes to the file out of the commits.
An exclusive lock on the folder excludes a second process; the epoch rises with each start.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import Self, TypeVar

from control_plane.store import statements
from control_plane.store.bounds import Bounds
from control_plane.store.checkpoints import Checkpoints
from control_plane.store.feed import HISTORY, Feed
from control_plane.store.moved import MigrationNote, MigrationState, refuse_noted_store
from control_plane.store.protocol import (
    LAST,
    Entry,
    KeyChange,
    Listing,
    Operation,
    check_transaction,
)
from control_plane.store.write_times import WriteTimes
from control_plane.store.writer import Writer, disk_error
from wire.errors import Busy, ConfigError

_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "busy_timeout=5000",
    "wal_autocheckpoint=0",
)
_SWITCH_S = 0.0001
"""Switch interval of Python's GIL, for the whole process: the writer's longest wait for the event
loop. At Python's 5 ms it may wait forever: a loop that computes, but polls its
sockets every 2 ms, releases the GIL and takes it again before the writer wakes (measured:
0 transactions in 2 s, 8,700 a second with this)."""
ARRIVING = "migrating"
"""Folder below a store's, in which a store from another engine is made."""
T = TypeVar("T")


class SqliteStore:
    """Implements `control_plane.store.Store` in the folder `path`."""

    def __init__(
        self,
        path: Path,
        history: int = HISTORY,
        *,
        strict: bool = False,
        migrating: bool = False,
    ) -> None:
        """Open nothing yet; `strict` refuses what not every engine accepts (`bounds`).

        `migrating` also opens a store that has a note of a migration.
        """
        self._migrating = migrating
        self.bounds = Bounds(strict=strict)
        self.times = WriteTimes()
        self._path = path
        self._history = history
        self._lock = -1
        self._epoch = 0
        self._feed: Feed | None = None
        self._writer: Writer | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._reader: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        """Lock the folder, recover, raise the epoch."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = take_lock(self._path / "lock")
        with ExitStack() as on_failure:
            on_failure.callback(os.close, self._lock)
            try:
                writer = self._connect()
                on_failure.callback(writer.close)
                self._recover(writer)
            except sqlite3.Error as e:
                raise ConfigError(
                    f"cannot open {self._path / 'twine.db'}: {e}",
                    hint="is the disk full or the file damaged? restore the last backup",
                ) from e
            on_failure.pop_all()
        assert self._feed
        self._checkpoints = Checkpoints(self._connect())
        self._readers = ThreadPoolExecutor(1, "store-reader")
        self._reader = self._connect()
        self._writer = Writer(writer, self._checkpoints, self._feed)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit accepted writes, then unlock the folder."""
        assert self._writer
        assert self._readers
        assert self._reader
        writer, self._writer = self._writer, None  # later writes are refused, not forgotten
        await writer.close()
        self._checkpoints.close()
        self._readers.shutdown()
        self._reader.close()
        os.close(self._lock)
        self._readers = self._reader = None

    def epoch(self) -> int:
        """Return the term that began when the store was opened."""
        return self._epoch

    def revision(self) -> int:
        """Return the newest revision that is on disk."""
        assert self._feed
        return self._feed.revision

    async def get(self, key: str) -> Entry | None:
        """Return the entry of a key."""
        return await self._read(lambda db: statements.find(db, key))

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        """Return the keys below a prefix and after a key, from one snapshot of the database."""
        begin = max(prefix, after and after + "\0")  # the first possible key after `after`
        return Listing(
            *await self._read(lambda db: statements.read_range(db, begin, prefix + LAST, limit))
        )

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once it is on disk, or raise `Conflict`."""
        if self._writer is None:
            raise Busy("cannot use the store: it is not open")
        check_transaction(compare, operations)
        self.bounds.check(operations)
        with self.times.measured():
            return await self._writer.write(compare, operations)

    def failure(self) -> str:
        """Return why the store can no longer be written; empty: it can."""
        return "" if self._writer is None else self._writer.failure()

    async def wait_failed(self) -> None:
        """Never return; raise the reason once the store can no longer be written."""
        assert self._writer
        await self._writer.wait_failed()

    def watch(self, prefix: str, from_revision: int) -> AsyncIterator[KeyChange]:
        """Yield changes after a revision."""
        assert self._feed
        return self._feed.follow(prefix, from_revision)

    async def compact(self, revision: int) -> None:
        """Drop the history up to a revision, in memory and on disk."""
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
        """Upgrade the tables, raise the epoch, and read the history for watchers."""
        if statements.needs_upgrade(writer):
            self._copy_before_upgrade(writer)
        meta = statements.read_meta(writer)
        if copied_at := meta.get("copied_at"):
            made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(copied_at))
            raise ConfigError(
                f"{self._path / 'twine.db'} is a copy, made at {made}: a control plane that uses "
                "it would end tasks that were started since",
                hint="twine-control-plane restore-store --from COPY (docs/operating.md)",
            )
        if not self._migrating:
            self._refuse_migration(meta)
        revision, trimmed = statements.revision(writer), meta.get("compacted", 0)
        self._epoch = meta.get("epoch", 0) + 1
        statements.write_meta(
            writer, schema=statements.SCHEMA, epoch=self._epoch, revision=revision
        )
        self._feed = Feed(revision, trimmed, self._history)
        log = statements.read_log(writer, trimmed)
        self._feed.extend(list(changes) for _, changes in groupby(log, lambda c: c.revision))

    def _refuse_migration(self, meta: Mapping[str, int]) -> None:
        """Raise `ConfigError` if the records were moved to another engine, or are incomplete."""
        if (note := note_of(meta)) is not None:
            refuse_noted_store(str(self._path), note)
        if (arriving := self._path / ARRIVING).exists():
            at = int(arriving.stat().st_mtime)
            refuse_noted_store(str(self._path), MigrationNote(0, MigrationState.INCOMING, at))

    def _copy_before_upgrade(self, writer: sqlite3.Connection) -> None:
        """Copy the file before an upgrade changes its tables, for a downgrade."""
        kept, made = self._path / "twine.db.before-upgrade", self._path / "twine.db.copy"
        made.unlink(missing_ok=True)
        with closing(sqlite3.connect(made)) as copy:
            writer.backup(copy)
        made.replace(kept)

    # -- reading

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._readers is None or self._reader is None:
            raise Busy("cannot use the store: it is not open")
        try:
            return await self._loop.run_in_executor(self._readers, read, self._reader)
        except sqlite3.Error as e:
            raise disk_error(e) from e


def note_of(meta: Mapping[str, int]) -> MigrationNote | None:
    """Return the note of a migration in a store's metadata."""
    for state in MigrationState:
        if run := meta.get(state):
            return MigrationNote(run, state, meta.get("migrated_at", 0))
    return None


def take_lock(path: Path) -> int:
    """Take sole ownership of a store's folder by its file `lock`, or raise `Busy`."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(lock)
        raise Busy(
            f"cannot open the store in {path.parent}: another control plane uses it",
            hint="stop the other process, or use another state folder for this one",
        ) from e
    return lock
