"""Reads and sets values in pinned BPF maps, which configure programs in the kernel.

The first fields of bpf_map_info are type, id, key_size, value_size (`agent.machine.bpf`). Below a
root other than `/` a map is a file of lines `KEY VALUE` in `/run/recorded/bpf`. So a recorded host
has maps, and nothing reaches the real one.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

from agent.machine import bpf
from agent.machine.bpf import PINNED
from agent.machine.descriptors import closing
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

RECORDED = "/run/recorded/bpf"
ARRAY = 2
"""The type with one value for each key (BPF_MAP_TYPE_ARRAY)."""
NUMBER_SIZES = (1, 2, 4, 8)
"""Sizes of a value that is one number."""


def find_value(fs: KernelFs, name: str, key: int) -> int | None:
    """Return a number in an array map that is pinned below `/sys/fs/bpf`; None if there is no
    such map, key or number.
    """
    if fs.root != Path("/"):
        return _recorded(fs, name).get(key)
    fs.noticed(name, 0, b"")  # marks the read as one that a recorded look cannot repeat
    try:
        with closing(bpf.open_pinned(f"{PINNED}/{name}")) as fd:
            kind, size = _shape(fd)
            if kind != ARRAY or size not in NUMBER_SIZES:
                return None
            found = _element(bpf.BpfCommand.MAP_LOOKUP, fd, key, bytes(size))
    except OSError:
        return None
    return int.from_bytes(found, "little")


def set_value(fs: KernelFs, name: str, key: int, value: int) -> None:
    """Set a number in an array map. Raises `KernelFileError`."""
    if fs.root != Path("/"):
        known = _recorded(fs, name) | {key: value}
        fs.write(f"{RECORDED}/{name}", "".join(f"{k} {v}\n" for k, v in known.items()))
        return
    try:
        with closing(bpf.open_pinned(f"{PINNED}/{name}")) as fd:
            _element(bpf.BpfCommand.MAP_UPDATE, fd, key, value.to_bytes(_shape(fd)[1], "little"))
    except (OSError, OverflowError) as e:
        why = (
            "it does not fit into a value of the map"
            if isinstance(e, OverflowError)
            else e.strerror
        )
        raise KernelFileError(f"cannot set key {key} of map {name} to {value}: {why}") from e


def _shape(fd: int) -> tuple[int, int]:
    """Return type and size of a value of a map."""
    kind, _, _, size = struct.unpack("=4I", bpf.object_info(fd, 16))
    return kind, size


def _element(command: bpf.BpfCommand, fd: int, key: int, value: bytes) -> bytes:
    keyed = ctypes.create_string_buffer(struct.pack("=I", key), 4)
    data = ctypes.create_string_buffer(value, len(value))
    attributes = struct.pack("=IIQQQ", fd, 0, ctypes.addressof(keyed), ctypes.addressof(data), 0)
    bpf.call(command, attributes, keyed, data)
    return data.raw


def _recorded(fs: KernelFs, name: str) -> dict[int, int]:
    lines = (line.split() for line in (fs.find(f"{RECORDED}/{name}") or "").splitlines())
    return {int(key): int(value) for key, value in filter(None, lines)}
