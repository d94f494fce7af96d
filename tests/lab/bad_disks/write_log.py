"""Reads the log of dm-log-writes: every write in its order, with flushes and marks.

The log has a superblock. Each entry has one sector with a header, followed by the written data
(Linux, drivers/md/dm-log-writes.c; numbers are little-endian, sizes in sectors).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

MAGIC = 0x6A736677736872
SUPER = struct.Struct("<QQQI")
"""Fields: magic, version, number of entries, bytes of a sector."""
HEADER = struct.Struct("<QQQQ")
"""Fields: sector, number of sectors, flags, bytes of a mark."""


class Flag(IntFlag):
    """Type of an entry."""

    FLUSH = 1
    """All earlier writes are durable once this entry completes."""
    FUA = 2
    """This write itself is durable once it completes."""
    DISCARD = 4
    MARK = 8
    METADATA = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: bytes at a position, or a mark."""

    flags: Flag
    at: int
    data: bytes

    @property
    def is_flush(self) -> bool:
        return bool(self.flags & (Flag.FLUSH | Flag.FUA))

    @property
    def word(self) -> str:
        return self.data.decode() if self.flags & Flag.MARK else ""


def entries(device: Path) -> Iterator[Entry]:
    """Yield the entries of a log, oldest first."""
    fd = os.open(device, os.O_RDONLY)
    try:
        magic, version, count, sector = SUPER.unpack(os.pread(fd, SUPER.size, 0))
        assert (magic, version) == (MAGIC, 1), "this is no log of dm-log-writes"
        position = sector
        for _ in range(count):
            head = os.pread(fd, sector, position)
            at, sectors, number, length = HEADER.unpack_from(head)
            flags, position = Flag(number), position + sector
            if flags & Flag.MARK:
                yield Entry(flags, 0, head[HEADER.size : HEADER.size + length].rstrip(b"\0"))
                continue
            if flags & Flag.DISCARD:
                yield Entry(flags, at * sector, b"")
                continue
            data = os.pread(fd, sectors * sector, position)
            assert len(data) == sectors * sector, "the log ends in the middle of an entry"
            position += len(data)
            yield Entry(flags, at * sector, data)
    finally:
        os.close(fd)
