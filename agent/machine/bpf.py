"""The bpf(2) system call. The first fields of its structures are stable across kernels.

Source: Linux, include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from enum import IntEnum

PINNED = "/sys/fs/bpf"
_NUMBER = {"x86_64": 321, "aarch64": 280}
"""Number of the system call (Linux, syscall_64.tbl and asm-generic/unistd.h)."""


class BpfCommand(IntEnum):
    """Commands of the call (enum bpf_cmd)."""

    MAP_CREATE = 0
    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    PROG_LOAD = 5
    OBJ_PIN = 6
    OBJ_GET = 7
    PROG_ATTACH = 8
    OBJ_INFO = 15
    PROG_QUERY = 16


def call(command: BpfCommand, attributes: bytes, *_alive: object) -> tuple[int, bytes]:
    """Make the call; return its result, and the attributes that the kernel wrote.

    `_alive` keeps the buffers alive whose addresses are in the attributes. Raises `OSError`.
    """
    number = _NUMBER.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    data = ctypes.create_string_buffer(attributes, len(attributes))
    found: int = libc.syscall(
        ctypes.c_long(number), ctypes.c_int(command), data, ctypes.c_uint(len(attributes))
    )
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found, data.raw


def open_pinned(path: str) -> int:
    """Return a descriptor of the object that is pinned at a path. Raises `OSError`."""
    name = ctypes.create_string_buffer(path.encode())
    return call(BpfCommand.OBJ_GET, struct.pack("=QII", ctypes.addressof(name), 0, 0), name)[0]


def pin(fd: int, path: str) -> None:
    """Pin an object at a path until the path is removed or the host restarts. Raises `OSError`."""
    name = ctypes.create_string_buffer(path.encode())
    call(BpfCommand.OBJ_PIN, struct.pack("=QII", ctypes.addressof(name), fd, 0), name)


def object_info(fd: int, size: int) -> bytes:
    """Return the first bytes of the kernel's information on an object. Raises `OSError`."""
    info = ctypes.create_string_buffer(size)
    call(BpfCommand.OBJ_INFO, struct.pack("=IIQ", fd, size, ctypes.addressof(info)), info)
    return info.raw
