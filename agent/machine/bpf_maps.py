"""Values in pinned BPF maps: what programs in the kernel are configured by.

The bpf(2) call, of whose structures the first fields have stayed as they are (Linux,
include/uapi/linux/bpf.h: BPF_MAP_LOOKUP_ELEM 1, UPDATE 2, OBJ_GET 7, OBJ_GET_INFO_BY_FD 15; of
bpf_map_info type, id, key_size, value_size). Below another root than `/` a map is a file of lines
`KEY VALUE` in `/run/recorded/bpf`, so that a recorded host has them and nothing reaches this one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

from agent.errors import KernelFileError
from agent.machine.kernelfs import KernelFs

PINNED = "/sys/fs/bpf"
RECORDED = "/run/recorded/bpf"
_NUMBER = {"x86_64": 321, "aarch64": 280}
"""Of the call (Linux, syscall_64.tbl and asm-generic/unistd.h)."""
_LOOKUP, _UPDATE, _GET, _INFO = 1, 2, 7, 15
ARRAY = 2
"""The type with one value for each key (BPF_MAP_TYPE_ARRAY)."""
WORDS = (1, 2, 4, 8)
"""Sizes of a value that is one number."""


def find_value(fs: KernelFs, name: str, key: int) -> int | None:
    """Return a number in an array map that is pinned below `/sys/fs/bpf`; None where there is no
    such map, key or number.
    """
    if fs.root != Path("/"):
        return _recorded(fs, name).get(key)
    fs.noticed(name, 0, b"")  # no look can ask again
    try:
        fd = _opened(name)
    except OSError:
        return None
    try:
        kind, size, _ = _shape(fd)
        if kind != ARRAY or size not in WORDS:
            return None
        return int.from_bytes(_element(_LOOKUP, fd, key, bytes(size)), "little")
    except OSError:
        return None
    finally:
        os.close(fd)


def set_value(fs: KernelFs, name: str, key: int, value: int) -> None:
    """Set a number in an array map. Raises `KernelFileError`."""
    if fs.root != Path("/"):
        known = _recorded(fs, name) | {key: value}
        fs.write(f"{RECORDED}/{name}", "".join(f"{k} {v}\n" for k, v in known.items()))
        return
    try:
        fd = _opened(name)
        try:
            _element(_UPDATE, fd, key, value.to_bytes(_shape(fd)[1], "little"))
        finally:
            os.close(fd)
    except (OSError, OverflowError) as e:
        why = "it does not fit into a value of it" if isinstance(e, OverflowError) else e.strerror
        raise KernelFileError(f"cannot set key {key} of map {name} to {value}: {why}") from e


def _opened(name: str) -> int:
    path = ctypes.create_string_buffer(f"{PINNED}/{name}".encode())
    return _call(_GET, struct.pack("=QII", ctypes.addressof(path), 0, 0), path)


def _shape(fd: int) -> tuple[int, int, int]:
    """Return type, size of a value and number of keys of a map."""
    info = ctypes.create_string_buffer(24)
    _call(_INFO, struct.pack("=IIQ", fd, len(info), ctypes.addressof(info)), info)
    kind, _, _, size, keys, _ = struct.unpack("=6I", info.raw)
    return kind, size, keys


def _element(command: int, fd: int, key: int, value: bytes) -> bytes:
    keyed = ctypes.create_string_buffer(struct.pack("=I", key), 4)
    data = ctypes.create_string_buffer(value, len(value))
    attributes = struct.pack("=IIQQQ", fd, 0, ctypes.addressof(keyed), ctypes.addressof(data), 0)
    _call(command, attributes, keyed, data)
    return data.raw


def _call(command: int, attributes: bytes, *_alive: object) -> int:
    """Make the call. Raises `OSError`."""
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
    return found


def _recorded(fs: KernelFs, name: str) -> dict[int, int]:
    lines = (line.split() for line in (fs.find(f"{RECORDED}/{name}") or "").splitlines())
    return {int(key): int(value) for key, value in filter(None, lines)}
