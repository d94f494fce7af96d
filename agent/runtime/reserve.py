"""Room that is kept for records alone: with a full disk tasks can still be stopped (F-33).

A file that goes when a record finds no room, and comes back once there is some again. It is room
for data; where the trees of btrfs are full (metadata) it does not help. Blocking: call it through
a lane.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

DATA_BYTES = 4 << 20
"""A thousand records; each takes one block of 4 KiB."""


class Reserve:
    """The file that holds the room."""

    def __init__(self, file: Path, sync: Callable[[Path], None]) -> None:
        """Keep it in `file`; `sync` makes the file system give back what was removed."""
        self._file = file
        self._sync = sync
        self.is_held = False
        """Whether the room is taken, as far as was seen."""

    def fill(self) -> None:
        """Allocate the reserve unless it is held. Raises `OSError` where there is no room."""
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
        """Give the room back for what matters more; False where there is none."""
        self.is_held = False
        try:
            self._file.unlink()
        except FileNotFoundError:
            return False
        log.warning("the disk is full: room that was kept for records is given back")
        self._sync(self._file.parent)
        return True
