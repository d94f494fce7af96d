"""Disk space reserved for records, so that tasks can be stopped on a full disk (F-33).

The reserve is a file. It is removed when a record finds no space, and created again once there is
some. It reserves space for data; it does not help if the metadata of btrfs is full. Blocking: call
it through a lane.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

DATA_BYTES = 4 << 20
"""Space for a thousand records; each takes one block of 4 KiB."""


class Reserve:
    """The file that holds the reserved space."""

    def __init__(self, file: Path, sync: Callable[[Path], None]) -> None:
        """Keep the reserve in `file`; `sync` makes the file system free removed space at once."""
        self._file = file
        self._sync = sync
        self.is_held = False
        """Whether the file existed when last checked."""

    def fill(self) -> None:
        """Allocate the reserve unless it is held. Raises `OSError` if the disk is full."""
        self.is_held = self._file.exists()
        if self.is_held:
            return
        partial = self._file.with_suffix(".new")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, DATA_BYTES)
        finally:
            os.close(fd)
        partial.replace(self._file)
        self.is_held = True

    def release(self) -> bool:
        """Free the reserved space; False if the reserve is not held."""
        self.is_held = False
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        log.warning("the disk is full: the space reserved for records is released")
        self._sync(self._file.parent)
        return True
