"""What the checker knows of each machine, and how late the control plane may learn of changes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

DETECTION_S = 20.0
"""Most seconds until the control plane has noticed an event."""
POLL_S = 4.0
"""Most seconds from a machine's last answer to the start of its silence (polls last 3 s)."""
CONTACT_S = 8.0
"""Seconds without a fault after which contact with a machine is certain."""
REACTION_S = 3.0
"""Seconds that the control plane may take to act on a stored change."""


class StoredLoan(msgspec.Struct, frozen=True):
    """The fields read of the loan of a stored machine."""

    since: float
    promise_s: float = 0.0
    revoked_at: float | None = None


class StoredMachine(msgspec.Struct):
    """The fields read of a stored machine."""

    machine: str
    entitlement: str = ""
    state: str = "up"
    loan: StoredLoan | None = None


@dataclass(slots=True)
class CheckedMachine:
    """What the checker knows of one machine."""

    store: str = ""
    entitlement: str = ""
    state: str = "up"
    up_since: float = 0.0
    responsive: bool = True
    """Whether it can answer in time: neither it nor its network has a fault that prevents that."""
    responsive_since: float = float("-inf")
    last_contact: float = 0.0
    """When the machine last ceased to be responsive, after at least `CONTACT_S` without a fault."""
    unreachable_since: float | None = None
    """Since when it cannot be reached at all; None: it can."""
    in_maintenance: bool = False
    deadline_at: float = float("inf")
    cancelled_late_at: float = float("-inf")
    """When maintenance was last cancelled after its deadline."""
    loan: StoredLoan | None = None

    def may_be_forced_out(self, now: float) -> bool:
        """Return whether tasks may be taken down by force: the deadline of maintenance has passed.

        Writes that were decided before a cancellation may follow up to `REACTION_S` later.
        """
        return now >= self.deadline_at or now - self.cancelled_late_at < REACTION_S
