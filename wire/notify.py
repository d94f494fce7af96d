"""Sends messages to the service manager (sd_notify(3)); does nothing outside of systemd.

A service manager that is gone or hangs never ends or blocks the caller: the fence must kill tasks
even then.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence

log = logging.getLogger(__name__)

WATCHDOG = "WATCHDOG=1"
SEND_S = 0.5
"""Longest wait for a service manager whose queue of messages is full."""


def notify(*lines: str, fds: Sequence[int] = ()) -> None:
    """Send lines such as `READY=1`, `STATUS=…`, `WATCHDOG=1`, and descriptors with them."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.settimeout(SEND_S)
            s.connect(address)
            socket.send_fds(s, ["\n".join(lines).encode()], list(fds))
    except OSError as e:
        if lines[0] != WATCHDOG:  # sent too often for the log
            log.warning("cannot send %s to the service manager: %s", lines[0], e)
