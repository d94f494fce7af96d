"""Ports for programs that a test starts later."""

from __future__ import annotations

import random
import socket

_BELOW_EPHEMERAL = range(20_000, 32_000)
"""Ports that the kernel gives to no outgoing connection (32768 to 60999 by default): between the
choice and the start of the program another connection would take one of those."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which no program listens."""
    while True:
        port = random.choice(_BELOW_EPHEMERAL)
        try:
            with socket.create_server((host, port)):
                return port
        except OSError:
            continue
