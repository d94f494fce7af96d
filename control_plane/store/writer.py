"""The one thread that writes to the durable store, and what its end means.

All transactions that wait while one is being synced share the next sync. The thread answers
each, or it is told why it cannot: a disk that is full refuses a write and takes the next one
when there is room, one that fails while it syncs leaves the outcome unknown, and a thread that
dies fails all that waits, is seen by readiness and ends the process (BUG-CP13).
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

from control_plane.errors import UnknownOutcome
from control_plane.store import statements
from control_plane.store.checkpoints import Checkpoints
from control_plane.store.feed import Feed
from control_plane.store.protocol import KeyChange, Operation, Put
from wire.errors import Busy, Conflict, TwineError

log = logging.getLogger(__name__)
_GROUP_MAX = 512
"""Transactions that share one sync at most, so that the first does not wait too long."""
_ROWS_MAX = 4096
"""Rows that do."""
SLOW_S = 30.0
"""A disk that does not answer for so long leaves the outcome of what waits unknown, and no more
is taken until it answers. One that is only slow takes tens of milliseconds for a sync."""
_LOOKS = 4
"""The disk is looked at so often in that time: a pause of this process is one look, no more."""


@dataclass(slots=True)
class _Write:
    """One transaction on its way through the writer thread."""

    compare: Mapping[str, int]
    operations: Sequence[Operation]
    done: asyncio.Future[int]
    changes: list[KeyChange] = field(default_factory=list)
    error: Exception | None = None
    revision: int = 0


class Superseded(Busy):
    """Another process has taken the store over: this one may write nothing any more."""


class Writer:
    """Owns the connection that writes; everything but `_run` and below is the loop's."""

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
        """All that are not answered, in their order."""
        self._queue: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._waiting: deque[_Write] = deque()
        self._group: list[_Write] = []
        """What the thread is writing now."""
        self._look: asyncio.TimerHandle | None = None
        self._looks = 0
        """How often in a row the same write was the oldest."""
        self._failure: TwineError | None = None
        self._failed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store")
        self._thread.start()

    def failure(self) -> str:
        """Return why nothing can be written any more; empty: it can."""
        return str(self._failure or "")

    async def wait_failed(self) -> None:
        """Return never, or raise why nothing can be written any more."""
        await self._failed.wait()
        raise self._failure or AssertionError

    async def write(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        """Return the new revision once it is on disk; see `Store.txn`."""
        if self._failure is not None:
            raise self._failure
        if self._looks >= _LOOKS:
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
        if self._look is None:
            self._look_later()
        return await done

    async def close(self) -> None:
        """Commit what was accepted, then end."""
        self._send()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._look is not None:
            self._look.cancel()

    def _send(self) -> None:
        """Hand the writer what one turn of the loop wrote: to wake it costs a switch of threads."""
        if self._outbox:
            self._queue.put(self._outbox)
            self._outbox = []

    def _look_later(self) -> None:
        self._oldest = self._in_flight[0]
        self._look = self._loop.call_later(SLOW_S / _LOOKS, self._look_at_disk)

    def _look_at_disk(self) -> None:
        """Tell all that wait, once the oldest has waited too long, that the outcome is unknown."""
        self._look = None
        if not self._in_flight:
            return
        self._looks = self._looks + 1 if self._in_flight[0] is self._oldest else 0
        if self._looks >= _LOOKS:
            for write in self._in_flight:
                if not write.done.done():
                    why = f"its disk did not answer within {SLOW_S:.0f} s"
                    write.done.set_exception(_unknown(why))
        self._look_later()

    def _answer(self, group: list[_Write]) -> None:
        """Back on the loop: show the changes to watchers, then wake the writers."""
        self._feed.extend(write.changes for write in group if write.changes and not write.error)
        self._looks = 0
        for write in group:
            self._in_flight.popleft()
            if write.done.done():
                continue
            if write.error is not None:
                write.done.set_exception(write.error)
            else:
                write.done.set_result(write.revision)

    def _died(self, error: BaseException, group: list[_Write]) -> None:
        """Back on the loop: nothing will be written any more, so no caller may wait for it."""
        if isinstance(error, Superseded):
            self._failure = error
        else:
            log.critical("the writer of the store has died", exc_info=error)
            self._failure = Busy(
                f"the store cannot be used: its writer has ended: {error!r}",
                hint="this process ends; what was acknowledged is on disk",
            )
        self._failed.set()
        begun = {id(write) for write in group}
        for write in self._in_flight:
            if not write.done.done():
                lost = id(write) in begun
                write.done.set_exception(
                    _unknown("its writer has ended") if lost else self._failure
                )
        self._in_flight.clear()
        self._outbox.clear()

    # -- the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except BaseException as e:  # what it is does not matter: no other code would see it
            begun = [] if isinstance(e, Superseded) else self._group
            self._loop.call_soon_threadsafe(self._died, e, begun)
        finally:
            self._connection.close()

    def _write_all(self) -> None:
        """Take what waits, write it as one SQLite transaction, answer all."""
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
                self._loop.call_soon_threadsafe(self._answer, group)
                size = sum(len(change.value) for change in changes if change.value)
                self._checkpoints.wrote(self._connection, len(changes), size)

    def _commit(self, group: list[_Write]) -> list[KeyChange]:
        """Write a group; if the disk refuses, all of it fails."""
        connection, syncing = self._connection, False
        try:
            connection.execute("BEGIN IMMEDIATE")
            compared = {key for write in group for key in write.compare}
            revisions, epoch = statements.find_revisions(connection, compared)
            self._must_be_ours(epoch)
            changes = _settle(group, revisions, self._revision)
            if changes:
                statements.write(connection, changes)
            self._trim()
            syncing = True
            connection.execute("COMMIT")
        except Superseded:
            raise
        except Exception as e:  # the thread must live; the writer is told
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for write in group:
                write.error = _error(e, syncing=syncing)
            return []
        if changes:
            self._revision = changes[-1].revision
        return changes

    def _must_be_ours(self, found: int) -> None:
        """Refuse to write once another process has opened the store (F-43).

        The lock on the folder keeps it from that, unless the lock's file was removed.
        """
        if found != self._epoch:
            self._connection.execute("ROLLBACK")
            raise Superseded(
                f"cannot write to the store: another control plane opened it since, for the"
                f" {found}th time, this one for the {self._epoch}th",
                hint="one process only may own a state folder; nothing was changed",
            )

    def _trim(self) -> None:
        """Drop from the log what the feed has forgotten."""
        compacted = self._feed.compacted
        if compacted > self._trimmed:
            statements.trim(self._connection, compacted)
            self._trimmed = compacted


def _settle(group: list[_Write], revisions: dict[str, int], revision: int) -> list[KeyChange]:
    """Decide each transaction of a group after the ones before it; return all their changes.

    `revisions` holds those of the compared keys before the group; 0 or absent: no such key.
    """
    changes: list[KeyChange] = []
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
                write.changes.append(KeyChange(operation.key, value, revision))
            changes += write.changes
    return changes


def _error(error: Exception, *, syncing: bool) -> Exception:
    """Return what the failure of a group means for each of its writes.

    The commit is the last thing that is written to the log. If there was no room for it, it is
    not there. If the disk failed while it was synced, a crash may still bring it back, until
    the next write takes its place.
    """
    if not isinstance(error, sqlite3.Error):
        return error
    if syncing and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR:
        return _unknown(f"its disk failed: {error}")
    return unusable(error)


def unusable(error: sqlite3.Error) -> Busy:
    """Return the error of a read or a write that the disk refused."""
    return Busy(
        f"the store cannot be used: {error}",
        hint="is the disk full? nothing was changed; the request may be sent again",
    )


def _unknown(why: str) -> UnknownOutcome:
    return UnknownOutcome(
        f"unknown whether the store made a write: {why}",
        hint="look whether it is there before sending it again",
    )
