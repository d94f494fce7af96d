"""The single thread that writes to the durable store, and the handling of its failures.

All transactions that wait during a sync share the next one. Each gets an answer or an error. A full
disk refuses a write and accepts the next one when there is room. A disk that fails during a sync
leaves the outcome unknown. A dying thread fails all waiting writes; readiness reports it, and the
process ends (BUG-CP13).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.store import statements
from control_plane.store.checkpoints import Checkpoints
from control_plane.store.feed import Feed
from control_plane.store.protocol import KeyChange, Operation, Put, stale_error
from wire.errors import Busy, TwineError, UnknownOutcome

log = logging.getLogger(__name__)
_GROUP_MAX = 512
"""Maximum of transactions that share one sync, so that the first does not wait too long."""
_ROWS_MAX = 4096
"""Maximum of rows that share one sync."""
SLOW_S = 30.0
"""After this time without an answer of the disk, the outcome of waiting writes is unknown, and new
writes are refused until it answers. A disk that is only slow syncs in tens of milliseconds."""
_CHECKS = 4
"""Number of checks within `SLOW_S`: a pause of this process counts as one check."""


@dataclass(slots=True)
class _Write:
    """One transaction that waits for the writer thread or is in it."""

    compare: Mapping[str, int]
    operations: Sequence[Operation]
    done: asyncio.Future[int]
    changes: list[KeyChange] = field(default_factory=list)
    error: Exception | None = None
    revision: int = 0


class Superseded(Busy):
    """Another process has taken the store over: this one may no longer write."""


class Writer:
    """Owns the writing connection; `_run` runs in a thread, other public methods in the loop."""

    def __init__(
        self, connection: sqlite3.Connection, checkpoints: Checkpoints, feed: Feed
    ) -> None:
        self._connection = connection
        self._checkpoints = checkpoints
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._revision = feed.revision
        self._trimmed = feed.compacted
        self._epoch = statements.epoch(connection)
        self._outbox: list[_Write] = []
        self._in_flight: deque[_Write] = deque()
        """All unanswered writes, in order."""
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._waiting: deque[_Write] = deque()
        self._group: list[_Write] = []
        """The writes that the thread is committing now."""
        self._check_timer: asyncio.TimerHandle | None = None
        self._stuck_checks = 0
        """Consecutive checks that found the same oldest write."""
        self._failure: TwineError | None = None
        self._failed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store")
        self._thread.start()

    def failure(self) -> str:
        """Return why the store can no longer be written; empty: it can."""
        return str(self._failure or "")

    async def wait_failed(self) -> None:
        """Never return; raise the reason once the store can no longer be written."""
        await self._failed.wait()
        raise self._failure or AssertionError

    async def write(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once it is on disk; see `Store.txn`."""
        if self._failure is not None:
            raise self._failure
        if self._stuck_checks >= _CHECKS:
            raise Busy(
                f"the store cannot be used: its disk has not answered for {SLOW_S:.0f} s",
                hint="nothing was changed; the request may be sent again once the disk answers",
            )
        done: asyncio.Future[int] = self._loop.create_future()
        if not self._outbox:
            self._loop.call_soon(self._send)
        write = _Write(compare, operations, done)
        self._outbox.append(write)
        self._in_flight.append(write)
        if self._check_timer is None:
            self._schedule_check()
        return await done

    async def close(self) -> None:
        """Commit accepted writes, then end the thread."""
        self._send()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._check_timer is not None:
            self._check_timer.cancel()

    def _send(self) -> None:
        """Hand all writes of one turn of the loop over at once: a wake-up is a thread switch."""
        if self._outbox:
            self._queue.put(self._outbox)
            self._outbox = []

    def _schedule_check(self) -> None:
        self._oldest = self._in_flight[0]
        self._check_timer = self._loop.call_later(SLOW_S / _CHECKS, self._check_disk)

    def _check_disk(self) -> None:
        """Fail all waiting writes with `UnknownOutcome` once the oldest has waited too long."""
        self._check_timer = None
        if not self._in_flight:
            return
        self._stuck_checks = self._stuck_checks + 1 if self._in_flight[0] is self._oldest else 0
        if self._stuck_checks >= _CHECKS:
            for write in self._in_flight:
                if not write.done.done():
                    why = f"its disk did not answer within {SLOW_S:.0f} s"
                    write.done.set_exception(_unknown_outcome(why))
        self._schedule_check()

    def _answer_group(self, group: list[_Write]) -> None:
        """In the event loop: pass the changes to watchers, then answer the writes."""
        self._feed.extend(write.changes for write in group if write.changes and not write.error)
        self._stuck_checks = 0
        for write in group:
            self._in_flight.popleft()
            if write.done.done():
                continue
            if write.error is not None:
                write.done.set_exception(write.error)
            else:
                write.done.set_result(write.revision)

    def _fail_waiting(self, error: BaseException, group: list[_Write]) -> None:
        """In the event loop: fail all waiting writes, since the thread has ended."""
        if isinstance(error, Superseded):
            self._failure = error
        else:
            log.critical("the writer of the store has died", exc_info=error)
            self._failure = Busy(
                f"the store cannot be used: its writer has ended: {error!r}",
                hint="this process ends; acknowledged writes are on disk",
            )
        self._failed.set()
        begun_ids = {id(write) for write in group}
        for write in self._in_flight:
            if not write.done.done():
                is_begun = id(write) in begun_ids
                write.done.set_exception(
                    _unknown_outcome("its writer has ended") if is_begun else self._failure
                )
        self._in_flight.clear()
        self._outbox.clear()

    # -- the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except BaseException as e:  # no other code would see it
            begun = [] if isinstance(e, Superseded) else self._group
            self._loop.call_soon_threadsafe(self._fail_waiting, e, begun)
        finally:
            self._connection.close()

    def _write_all(self) -> None:
        """Commit waiting writes in groups, each as one SQLite transaction, until `close`."""
        waiting, stop = self._waiting, False
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
                self._group = group
                changes = self._commit(group)
                self._group = []
                self._loop.call_soon_threadsafe(self._answer_group, group)
                size = sum(len(change.value) for change in changes if change.value)
                self._checkpoints.wrote(self._connection, len(changes), size)

    def _commit(self, group: list[_Write]) -> list[KeyChange]:
        """Commit a group and return its changes; if the disk refuses, all its writes fail."""
        connection, syncing = self._connection, False
        try:
            connection.execute("BEGIN IMMEDIATE")
            compared = {key for write in group for key in write.compare}
            revisions, epoch = statements.find_revisions(connection, compared)
            self._check_epoch(epoch)
            changes = _decide_group(group, revisions, self._revision)
            if changes:
                statements.write(connection, changes)
            self._trim()
            syncing = True
            connection.execute("COMMIT")
        except Superseded:
            raise
        except Exception as e:  # the thread must continue; the callers get the error
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in group:
                write.error = _commit_error(e, syncing=syncing)
            return []
        if changes:
            self._revision = changes[-1].revision
        return changes

    def _check_epoch(self, found: int) -> None:
        """Raise `Superseded` once another process has opened the store (F-43).

        The lock on the folder prevents that, unless the lock's file was removed.
        """
        if found != self._epoch:
            self._connection.execute("ROLLBACK")
            raise Superseded(
                "cannot write to the store: another control plane has opened it since, for the "
                f"{found}th time; this one opened it for the {self._epoch}th",
                hint="only one process may own a state folder; nothing was changed",
            )

    def _trim(self) -> None:
        """Drop the part of the log that the feed has dropped."""
        compacted = self._feed.compacted
        if compacted > self._trimmed:
            statements.trim(self._connection, compacted)
            self._trimmed = compacted


def _decide_group(group: list[_Write], revisions: dict[str, int], revision: int) -> list[KeyChange]:
    """Check the transactions of a group in order; return the changes of those that succeed.

    `revisions` has the compared keys before the group; 0 or absent: no such key.
    """
    changes: list[KeyChange] = []
    for write in group:
        for key, expected in write.compare.items():
            found = revisions.get(key, 0)
            if found != expected:
                write.error = stale_error(key, expected, found)
                break
        else:
            revision += 1 if write.operations else 0
            write.revision = revision
            for operation in write.operations:
                value = operation.value if isinstance(operation, Put) else None
                revisions[operation.key] = 0 if value is None else revision
                write.changes.append(KeyChange(operation.key, value, revision))
            changes += write.changes
    return changes


def _commit_error(error: Exception, *, syncing: bool) -> Exception:
    """Return the error of each write of a failed group.

    The commit is written to the log last. If there was no room for it, it is
    not there. If the disk failed during the sync, the commit may reappear after a crash, until
    the next write overwrites it.
    """
    if not isinstance(error, sqlite3.Error):
        return error
    if syncing and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
        return _unknown_outcome(f"its disk failed: {error}")
    return disk_error(error)


def disk_error(error: sqlite3.Error) -> Busy:
    """Return the error of a read or a write that the disk refused."""
    return Busy(
        f"the store cannot be used: {error}",
        hint="is the disk full? nothing was changed; the request may be sent again",
    )


def _unknown_outcome(why: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"unknown whether the store made a write: {why}",
        hint="read the object before you send the change again",
    )
