"""Reserves the agent's port while no agent runs (BUG-AG10).

A second socket is bound to the port and does not listen. systemd keeps it between two runs of the
agent (file descriptor store). So no other program can bind the port meanwhile. The kernel refuses
callers at once, which shows the control plane that the host is alive (docs/adr/0040). A socket unit
would make callers wait, and silence means a dead host.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from agent.machine.notify import drop_descriptor, store_descriptor, stored_descriptors
from wire.errors import ConfigError

NAME = "port"


def listen(address: tuple[str, int], backlog: int) -> socket.socket:
    """Return a listening socket, after reserving its port.

    Raises `ConfigError` if another program has the port.
    """
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            _reserve(family, address)
        listener = _bound_socket(family, address)
        listener.listen(backlog)
    except OSError as e:
        raise ConfigError(f"cannot listen on {host}:{port}: {e.strerror}") from e
    return listener


def _reserve(family: socket.AddressFamily, address: tuple[str, int]) -> None:
    """Store a socket for the port in systemd, unless there is one; drop one for another port."""
    held = [socket.socket(fileno=fd) for fd in stored_descriptors(NAME)]
    ours = [s for s in held if s.family == family and s.getsockname()[:2] == address]
    for s in held:
        s.close()
    if ours:
        return
    if held:
        drop_descriptor(NAME)
    with _bound_socket(family, address) as fresh:
        store_descriptor(NAME, fresh.fileno())


def _bound_socket(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    """Return a socket that shares its port with our own sockets only.

    With SO_REUSEPORT sockets of one user share a port, with SO_REUSEADDR of any user (socket(7)).
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock
