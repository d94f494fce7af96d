"""Ports for programs that a test starts later."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports that the kernel assigns to no outgoing connection (it uses 32768 to 60999 by default).
Otherwise a connection could take the port before the program starts."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which no program listens."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        try:
            with socket.create_server((host, port)):
                return port
        except OSError:
            continue
