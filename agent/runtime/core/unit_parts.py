"""Unit properties that several kinds of units share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PAGE = 4096
UNLIMITED = (1 << 64) - 1

NO_CORES: Mapping[str, object] = MappingProxyType({"LimitCORE": UNLIMITED, "LimitCORESoft": 0})
"""No core dumps unless a program raises its limit. PAM sets the hard limit at each session, and
refuses the session if it may not (pam_limits(8) of Debian). The `Soft` property must come last."""

NO_RINGS = ("~io_uring_enter", "~io_uring_register", "~io_uring_setup")
"""The kernel carries out requests through io_uring without system call filters, for example opening
sockets of any family (io_uring_enter(2), IORING_OP_SOCKET). So no sandbox allows io_uring."""


HOST_SHELL = ("/usr/bin/nsenter", "--target=1", "--mount", "/bin/sh", "-c")
"""Begin of a command that runs a shell script on the host instead of in the unit's mounts."""


def texts(value: object) -> tuple[str, ...]:
    """Return the value of a list property as texts, empty for any other value."""
    return tuple(str(v) for v in value) if isinstance(value, list | tuple) else ()


def in_memory(path: str, memory_bytes: int) -> str:
    """Return the mount of a tmpfs for one task: half of its memory, one inode per page.

    Without it `PrivateDevices` binds the host's /dev/shm into the task's /dev.
    """
    size = memory_bytes // 2
    return f"{path}:mode=1777,nosuid,nodev,size={size},nr_inodes={size // PAGE}"
