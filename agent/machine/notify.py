"""Notifies systemd as a service (sd_notify(3)), and stores descriptors there; a no-op elsewhere.

A service manager that is gone or hangs never ends or blocks the caller: the fence must kill tasks
even then.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

WATCHDOG = "WATCHDOG=1"
SEND_S = 0.5
"""Longest wait for a service manager whose queue of messages is full."""
_FIRST_FD = 3
"""The first descriptor that systemd passes to a service (sd_listen_fds(3))."""


def notify(*lines: str) -> None:
    """Send lines such as `READY=1`, `STATUS=…`, `WATCHDOG=1` to the service manager."""
    _send(lines, [])


def store_descriptor(name: str, fd: int) -> None:
    """Store a descriptor in systemd for the next start of this service (FDSTORE=1).

    Without `FDPOLL=0` systemd would close a bound socket that does not listen, and a pipe without
    a writer: the kernel reports both as hung up.
    """
    _send(("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"), [fd])


def drop_descriptor(name: str) -> None:
    """Make systemd close the descriptors stored under a name."""
    _send(("FDSTOREREMOVE=1", f"FDNAME={name}"), [])


def stored_descriptors(name: str) -> list[int]:
    """Return the descriptors stored under a name, as new descriptors."""
    return [os.dup(fd) for called, fd in all_stored() if called == name]


def all_stored() -> list[tuple[str, int]]:
    """Return name and number of all descriptors that systemd passed to this process."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    names = os.environ.get("LISTEN_FDNAMES", "").split(":")
    numbers = range(_FIRST_FD, _FIRST_FD + int(os.environ.get("LISTEN_FDS", "0")))
    return list(zip(names, numbers, strict=False))


def _send(lines: tuple[str, ...], fds: list[int]) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
            s.settimeout(SEND_S)
            s.connect(address)
            socket.send_fds(s, ["\n".join(lines).encode()], fds)
    except OSError as e:
        if lines[0] != WATCHDOG:  # sent too often for the log
            log.warning("cannot send %s to the service manager: %s", lines[0], e)


def watchdog_s() -> float | None:
    """Return systemd's watchdog interval in s, None without a watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() else None
