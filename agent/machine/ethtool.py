"""Settings of network interfaces: rings, queues, coalescing, offloads.

Uses the kernel's `SIOCETHTOOL` call with its oldest structures, which consist of 32-bit numbers and
which every driver supports (Linux, include/uapi/linux/ethtool.h). Below a root other than `/` the
numbers come from `/run/recorded/ethtool/NIC`, a line `group number number …` for each structure.
So a recorded host has settings, and nothing reaches the real one.
"""

from __future__ import annotations

import array
import errno
import fcntl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

SIOCETHTOOL = 0x8946
RECORDED = "/run/recorded/ethtool"


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """One structure: the commands that read and set it, and its length without the command."""

    name: str
    get: int
    set: int
    words: int


COALESCING = SettingGroup("coalescing", 0x0E, 0x0F, 22)
RINGS = SettingGroup("rings", 0x10, 0x11, 8)
CHANNELS = SettingGroup("channels", 0x3C, 0x3D, 8)
RX_CHECKSUM = SettingGroup("rx_checksum", 0x14, 0x15, 1)
TX_CHECKSUM = SettingGroup("tx_checksum", 0x16, 0x17, 1)
SCATTER_GATHER = SettingGroup("scatter_gather", 0x18, 0x19, 1)
TSO = SettingGroup("tso", 0x1E, 0x1F, 1)
GSO = SettingGroup("gso", 0x23, 0x24, 1)
GRO = SettingGroup("gro", 0x2B, 0x2C, 1)
FLAGS = SettingGroup("flags", 0x25, 0x26, 1)


def find_words(fs: KernelFs, nic: str, group: SettingGroup) -> list[int] | None:
    """Return a structure, None if the interface or its driver does not have it."""
    if fs.root != Path("/"):
        return _recorded(fs, nic).get(group.name)
    try:
        found = _call(nic, group.get, [0] * group.words)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
            fs.noticed(nic, group.get, b"")
            return None
        raise KernelFileError(f"cannot read {group.name} of {nic}: {e.strerror}") from e
    fs.noticed(nic, group.get, array.array("I", found).tobytes())
    return found


def set_words(fs: KernelFs, nic: str, group: SettingGroup, words: Sequence[int]) -> None:
    """Set a whole structure."""
    if fs.root != Path("/"):
        known = _recorded(fs, nic) | {group.name: [*words]}
        lines = (f"{name} {' '.join(map(str, values))}\n" for name, values in known.items())
        fs.write(f"{RECORDED}/{nic}", "".join(lines))
        return
    try:
        _call(nic, group.set, words)
    except OSError as e:
        raise KernelFileError(f"cannot set {group.name} of {nic}: {e.strerror}") from e


def _call(nic: str, command: int, words: Sequence[int]) -> list[int]:
    data = array.array("I", [command, *words])
    request = struct.pack("16sP", nic.encode(), data.buffer_info()[0])
    import socket  # imported only on a host with a card to query

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock.fileno(), SIOCETHTOOL, request)
    return list(data[1:])


def _recorded(fs: KernelFs, nic: str) -> dict[str, list[int]]:
    lines = (line.split() for line in (fs.find(f"{RECORDED}/{nic}") or "").splitlines())
    return {name: [int(number) for number in rest] for name, *rest in filter(None, lines)}
