"""Client of the program that may change the network (agent/netd.py), over its socket."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import msgspec

from agent.machine import port_gates
from agent.netplan import NetAnswer, NetRequest
from wire.errors import HostError

SOCKET = "/run/twine/network.sock"
PATIENCE_S = 180.0
"""Longest wait for an answer. systemd may have to start the program first: this took a minute on a
busy emulated host."""
_ELSEWHERE = ("192.0.2.1", 9)
"""An address of no host (RFC 5737). Its route gives the host's own address; nothing is sent."""
_SIOCGIFADDR = 0x8915
_LINKS = "/sys/class/net"
_NOT_OURS = ("lo", "tw")
"""The loopback, and links to tasks."""


class HostNetwork:
    """The network of this host. Blocking: call it through a lane."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path

    def ask(self, ask: NetRequest) -> NetAnswer:
        """Send a request; return the networks after it. Raises `HostError`."""
        try:
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(PATIENCE_S)
                s.connect(self._path)
                s.sendall(msgspec.json.encode(ask) + b"\n")
                with s.makefile("rb") as lines:
                    line = lines.readline()
            if not line:
                raise HostError(
                    "twine-network.service ended without an answer",
                    hint="journalctl -u twine-network",
                )
            answer = msgspec.json.decode(line, type=NetAnswer)
        except (OSError, msgspec.MsgspecError, UnicodeError) as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            raise HostError(
                f"cannot send a network request to twine-network.service: {why}",
                hint="systemctl status twine-network.socket",
            ) from e
        if answer.error:
            raise HostError(answer.error, hint="journalctl -u twine-network")
        return answer

    def has_gate(self, name: str) -> bool:
        """Return whether a port gate exists with all its BPF programs."""
        return port_gates.is_complete(name)

    def gates(self) -> set[str]:
        """Return the names of the port gates that have all their BPF programs."""
        return port_gates.gates()

    def address(self) -> str:
        """Return the IPv4 address by which other hosts reach this one; empty if it has none."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                s.connect(_ELSEWHERE)
                return str(s.getsockname()[0])
            except OSError:  # no default route: use the first link with an address
                # if_nameindex needs netlink, which the agent may not use.
                links = sorted(os.listdir(_LINKS)) if os.path.isdir(_LINKS) else []
                found = [_address_of(s, name) for name in links if not name.startswith(_NOT_OURS)]
        return next(filter(None, found), "")


def _address_of(s: socket.socket, link: str) -> str:
    """Return the IPv4 address of a link, empty if it has none (netdevice(7))."""
    try:
        request = struct.pack("16s16x", link.encode())
        return socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""
