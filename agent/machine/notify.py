"""Tells systemd how the service is doing (sd_notify(3)); a no-op elsewhere."""

from __future__ import annotations

import os
import socket


def notify(*lines: str) -> None:
    """Send `READY=1`, `STATUS=…`, `WATCHDOG=1` and the like to who started us."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        s.sendto("\n".join(lines).encode(), address)


def watchdog_s() -> float | None:
    """Return how often systemd wants to hear from us at the latest, None if it does not."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() else None
