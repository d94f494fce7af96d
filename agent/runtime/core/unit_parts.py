"""Parts of properties that units of several kinds share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PAGE = 4096
UNLIMITED = (1 << 64) - 1

NO_CORES: Mapping[str, object] = MappingProxyType({"LimitCORE": UNLIMITED, "LimitCORESoft": 0})
"""No core dumps, unless a program asks: PAM raises the hard limit at each session, and refuses the
session where it may not (pam_limits(8) of Debian). A property with `Soft` comes after its other."""

NO_RINGS = ("~io_uring_enter", "~io_uring_register", "~io_uring_setup")
"""What is asked for through a ring the kernel does past every filter of system calls: sockets of
any family, above all (io_uring_enter(2), IORING_OP_SOCKET). So no sandbox has rings."""


def in_memory(path: str, memory_bytes: int) -> str:
    """Return the mount of a task's own folder in memory: half of its memory, and a file a page.

    `PrivateDevices` alone binds the host's /dev/shm into the task's /dev.
    """
    size = memory_bytes // 2
    return f"{path}:mode=1777,nosuid,nodev,size={size},nr_inodes={size // PAGE}"
