"""Network interfaces' own settings: rings, queues, coalescing, offloads.

The kernel's `SIOCETHTOOL` call with its oldest structures, all of 32-bit words, which every driver
answers (Linux, include/uapi/linux/ethtool.h). Below another root than `/` the words come from
`/run/recorded/ethtool/NIC`, a line `group word word …` for each structure, so that a recorded host
has them and nothing reaches this one.
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
class Group:
    """One structure of words: how it is got and set, and its length without the command."""

    name: str
    get: int
    set: int
    words: int


COALESCING = Group("coalescing", 0x0E, 0x0F, 22)
RINGS = Group("rings", 0x10, 0x11, 8)
CHANNELS = Group("channels", 0x3C, 0x3D, 8)
RX_CHECKSUM = Group("rx_checksum", 0x14, 0x15, 1)
TX_CHECKSUM = Group("tx_checksum", 0x16, 0x17, 1)
SCATTER_GATHER = Group("scatter_gather", 0x18, 0x19, 1)
TSO = Group("tso", 0x1E, 0x1F, 1)
GSO = Group("gso", 0x23, 0x24, 1)
GRO = Group("gro", 0x2B, 0x2C, 1)
FLAGS = Group("flags", 0x25, 0x26, 1)


def find_words(fs: KernelFs, nic: str, group: Group) -> list[int] | None:
    """Return a structure, None where the interface or its driver has none."""
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


def set_words(fs: KernelFs, nic: str, group: Group, words: Sequence[int]) -> None:
    """Set a structure as a whole, as the kernel takes it."""
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
    return {name: [int(word) for word in words] for name, *words in filter(None, lines)}
