"""Stores descriptors of a service in systemd, and reads what systemd passed to the service."""

from __future__ import annotations

import os

from wire.notify import notify

_FIRST_FD = 3
"""The first descriptor that systemd passes to a service (sd_listen_fds(3))."""


def store_descriptor(name: str, fd: int) -> None:
    """Store a descriptor in systemd for the next start of this service (FDSTORE=1).

    Without `FDPOLL=0` systemd would close a bound socket that does not listen, and a pipe without
    a writer: the kernel reports both as hung up.
    """
    notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])


def drop_descriptor(name: str) -> None:
    """Make systemd close the descriptors stored under a name."""
    notify("FDSTOREREMOVE=1", f"FDNAME={name}")


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


def watchdog_s() -> float | None:
    """Return systemd's watchdog interval in s, None without a watchdog."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() else None
