"""A file in memory that systemd keeps between two runs of the agent.

It is a memfd in the file descriptor store of our unit: on no file system, and lost at reboot. Two
slots are written in turns, so a crash in the middle of a write loses only the new content.
"""

from __future__ import annotations

import hashlib
import os

from agent.machine.notify import store_descriptor, stored_descriptors
from wire.errors import HostError

SLOT_BYTES = 4 << 20


class MemoryFile:
    """Bytes that survive this process. Without systemd (in tests) they do not."""

    def __init__(self, name: str) -> None:
        """Open the file that an earlier agent stored under a name, or an empty one."""
        held = stored_descriptors(name)
        if held:
            self._fd, rest = held[0], held[1:]
            for fd in rest:
                os.close(fd)
        else:
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
            os.ftruncate(self._fd, 1 + 2 * (SLOT_BYTES + 40))
            store_descriptor(name, self._fd)

    def close(self) -> None:
        """Close it in this process; systemd keeps it."""
        os.close(self._fd)

    def read(self) -> bytes:
        """Return the last written content; empty if it is damaged or missing."""
        at = self._slot(os.pread(self._fd, 1, 0) == b"\1")
        head = os.pread(self._fd, 40, at)
        size = int.from_bytes(head[:8], "little")
        if size > SLOT_BYTES:
            return b""
        data = os.pread(self._fd, size, at + 40)
        return data if hashlib.sha256(data).digest() == head[8:] else b""

    def write(self, data: bytes) -> None:
        """Replace the content, whole or not at all."""
        if len(data) > SLOT_BYTES:
            raise HostError(f"{len(data)} bytes do not fit into {SLOT_BYTES}")
        other = os.pread(self._fd, 1, 0) != b"\1"
        head = len(data).to_bytes(8, "little") + hashlib.sha256(data).digest()
        os.pwrite(self._fd, head + data, self._slot(other))
        os.pwrite(self._fd, b"\1" if other else b"\0", 0)

    @staticmethod
    def _slot(second: bool) -> int:
        return 1 + (SLOT_BYTES + 40) * second
