"""Moves SQLite's write-ahead log into its file, beside the writer and not in its way.

SQLite alone does it within a commit, every 4 MB: that commit then takes 15 ms instead of 2.
Here a thread of its own moves most of it while the writer goes on; then the writer moves
the little that came since, after which SQLite begins its log again. Losing a checkpoint
loses nothing: what is in the log is as durable as what is in the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from concurrent.futures import Future, ThreadPoolExecutor

_EVERY = 4 << 20
"""Bytes in the log after which it is moved; a crash reads back a few times as many."""
_PER_ROW = 8 << 10
"""Bytes that a row costs beside twice its value: pages that are written in part."""
_PASSES = 2
"""Each moves what was written during the one before: 4 MB, 1 MB, and the writer the rest."""
_MOVE = "PRAGMA wal_checkpoint(PASSIVE)"


class Checkpoints:
    """Counts what the writer writes; everything but the moving runs in the writer's thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Own a connection, for the moving thread alone."""
        self._connection = connection
        self._mover = ThreadPoolExecutor(1, "store-checkpoint")
        self._moving: Future[None] | None = None
        self._written = 0

    def wrote(self, writer: sqlite3.Connection, rows: int, size: int) -> None:
        """Note a commit of so many rows and bytes, and move the log when it is time."""
        self._written += rows * _PER_ROW + 2 * size
        if self._moving is None:
            if self._written >= _EVERY:
                self._written = 0
                self._moving = self._mover.submit(self._move)
        elif self._moving.done():
            self._moving.result()  # what it did not expect ends the writer, loudly
            self._moving = None
            with contextlib.suppress(sqlite3.Error):  # a full disk fails the next commit, loudly
                writer.execute(_MOVE).fetchone()

    def close(self) -> None:
        """Wait for the mover to end."""
        self._mover.shutdown()
        self._connection.close()

    def _move(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            for _ in range(_PASSES):
                self._connection.execute(_MOVE).fetchone()
