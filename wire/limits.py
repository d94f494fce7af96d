"""Limits of an HTTP server: numbers of connections, and seconds for each step of a request."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

_SHARE = 4
"""A server takes at most a quarter of the process' descriptors."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The largest number of connections, and how long each step of one may take."""

    connections: int = 4096
    pending: int = 1024
    """Connections before TLS is established (0.3 MB each)."""
    anonymous: int = 1024
    """Established connections without a certificate."""
    unproved_per_address: int = 128
    """Limit of `pending` and of `anonymous` for one IPv4 address or IPv6 /64; on a unix socket
    for one user."""
    per_peer: int = 64
    """Connections of one certificate's name."""
    handshakes_per_address: int = 4
    """Handshakes that run at once; others of that address wait."""
    first_byte_s: float = 10.0
    handshake_s: float = 10.0
    header_s: float = 10.0
    """From the first byte of a request to the end of its header; also the idle time allowed to
    a caller without an identity."""
    idle_s: float = 75.0
    """Between two requests of a caller with an identity."""
    write_s: float = 30.0
    """How long an answer waits for a client that reads nothing."""

    def within(self, descriptors: int) -> ConnectionLimits:
        """Return these limits, reduced to what a process with that many descriptors can serve."""
        most = max(16, descriptors // _SHARE)
        return replace(
            self,
            connections=min(self.connections, most),
            pending=min(self.pending, max(8, most // 2)),
            anonymous=min(self.anonymous, max(8, most // 4)),
            unproved_per_address=min(self.unproved_per_address, max(4, most // 4)),
        )


LOCAL = ConnectionLimits(
    connections=256, pending=256, anonymous=256, unproved_per_address=192, idle_s=300.0
)
"""Limits of a unix socket: its callers show no certificate; the kernel names their users."""


def raise_descriptor_limit() -> int:
    """Raise the limit of descriptors to what the unit allows (`LimitNOFILE`), and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard
