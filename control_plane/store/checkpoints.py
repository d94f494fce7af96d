"""Moves SQLite's write-ahead log into its file in another thread, without delaying the writer.

SQLite by itself does it within a commit, every 4 MB: that commit then takes 15 ms instead of 2.
Here a separate thread moves most of it while the writer continues. Then the writer moves
the small rest, after which SQLite restarts its log. A failed checkpoint
loses nothing: data in the log is as durable as data in the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor

_EVERY = 4 << 20
"""Bytes in the log after which it is moved; a start after a crash reads a few times as many."""
_PER_ROW = 8 << 10
"""Bytes that a row costs in addition to twice its value: partly written pages."""
_PASSES = 2
"""Each pass moves what was written during the one before: 4 MB, 1 MB; the writer moves the rest."""
_MOVE = "PRAGMA wal_checkpoint(PASSIVE)"


class Checkpoints:
    """Counts the writer's bytes; everything except the moving runs in the writer's thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Own a connection, for the moving thread alone."""
        self._connection = connection
        self._mover = ThreadPoolExecutor(1, "store-checkpoint")
        self._moving: Future[None] | None = None
        self._written = 0

    def wrote(self, writer: sqlite3.Connection, rows: int, size: int) -> None:
        """Note a commit of `rows` rows and `size` bytes, and move the log when it is due."""
        self._written += rows * _PER_ROW + 2 * size
        if self._moving is None:
            if self._written >= _EVERY:
                self._written = 0
                self._moving = self._mover.submit(self._move)
        elif self._moving.done():
            self._moving.result()  # an unexpected error ends the writer
            self._moving = None
            with contextlib.suppress(sqlite3.Error):  # a full disk fails the next commit
                writer.execute(_MOVE).fetchone()

    def close(self) -> None:
        """Wait for the mover to end."""
        self._mover.shutdown()
        self._connection.close()

    def _move(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            for _ in range(_PASSES):
                self._connection.execute(_MOVE).fetchone()
