"""The address of a connection, and the network that is charged for it."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Generic, TypeVar

Connection = TypeVar("Connection")
_UCRED = struct.Struct("3i")
"""pid, uid, gid: `struct ucred` of unix(7)."""
_REMEMBERED = 4096
SUSPECT_S = 60.0
"""How long a network stays a suspect."""
PROVED_S = 600.0
"""How long a proved identity protects its network from suspicion."""


class Suspects:
    """Networks whose connections recently took a place and did not use it.

    The networks of a flood are soon suspects, even thousands of them. A new caller is not a
    suspect, nor is a network from which a caller recently proved an identity.
    """

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._proved_until: dict[str, float] = {}

    def add(self, network: str, now: float) -> None:
        """Record that a network wasted a place."""
        _remember(self._until, network, now + SUSPECT_S)

    def record_proof(self, network: str, now: float) -> None:
        """Record that a caller from a network proved an identity."""
        _remember(self._proved_until, network, now + PROVED_S)

    def is_suspect(self, network: str, now: float) -> bool:
        """Return whether a network wasted a place recently, and no caller proved an identity."""
        return self._until.get(network, now) > now >= self._proved_until.get(network, now)


class ConnectionsByNetwork(Generic[Connection]):
    """Connections of each network, the oldest first."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Connection, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        """Return the number of connections of all networks."""
        return self._size

    def of(self, network: str) -> Mapping[Connection, None]:
        """Return the connections of a network."""
        return self._of.get(network, {})

    def largest(self) -> Mapping[Connection, None]:
        """Return the connections of the network that has most."""
        return max(self._of.values(), key=len, default={})

    def add(self, network: str, connection: Connection) -> None:
        """Add a connection as the youngest of its network."""
        self._of.setdefault(network, {})[connection] = None
        self._size += 1

    def remove(self, network: str, connection: Connection) -> None:
        """Remove a connection."""
        known = self._of[network]
        del known[connection]
        self._size -= 1
        if not known:
            del self._of[network]


def _remember(times: dict[str, float], network: str, until: float) -> None:
    times.pop(network, None)
    times[network] = until
    if len(times) > _REMEMBERED:
        del times[next(iter(times))]


def user_of(sock: socket.socket) -> tuple[int, int]:
    """Return (uid, gid) of the process on the other end of a unix socket.

    The kernel recorded them at connect(2) (SO_PEERCRED of unix(7)).
    """
    _, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid, gid


def origin_of(sock: socket.socket, name: object) -> tuple[str, str]:
    """Return the address of a connecting client, and the network that is charged for it."""
    if sock.family == socket.AF_UNIX:
        return "", f"user {user_of(sock)[0]}"
    address = str(name[0]) if isinstance(name, tuple) else ""
    return address, network_of(address)


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the network to charge: an IPv4 address, or the /64 that one IPv6 host owns."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        mapped = ip.ipv4_mapped
        return str(mapped or ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
