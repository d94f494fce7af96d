"""Limits of an HTTP server: numbers of connections, and seconds for each step of a request."""

from __future__ import annotations

import resource
from dataclasses import dataclass, replace

_SHARE = 4
"""A server takes at most one in four of the process' descriptors."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long each step of theirs may take."""

    connections: int = 4096
    pending: int = 1024
    """Before TLS is established, which takes 0.3 MB of each."""
    anonymous: int = 1024
    """Afterwards, without a certificate."""
    unproved_per_address: int = 128
    """Most of each of both, from one IPv4 address or IPv6 /64; on a unix socket: of one user."""
    per_peer: int = 64
    """Connections of one certificate's name."""
    handshakes_per_address: int = 4
    """At once; the others of that address wait their turn."""
    first_byte_s: float = 10.0
    handshake_s: float = 10.0
    header_s: float = 10.0
    """From the first byte of a request to the end of its header; also how long a caller
    without an identity may ask nothing."""
    idle_s: float = 75.0
    """Between two requests of one whose identity is known."""
    write_s: float = 30.0
    """How long an answer may wait for a reader that takes nothing of it."""

    def within(self, descriptors: int) -> ConnectionLimits:
        """Return these limits as far as a process with that many descriptors can keep them."""
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
