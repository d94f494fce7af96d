"""The checker's state of each machine, and how late the control plane may learn of changes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

DETECTION_S = 20.0
"""Seconds within which the control plane may not have noticed an event."""
POLL_S = 4.0
"""Seconds by which a machine's last answer may be older than the start of its silence."""
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
    """The checker's state of one machine."""

    store: str = ""
    entitlement: str = ""
    state: str = "up"
    up_since: float = 0.0
    responsive: bool = True
    """Whether it can answer in time: no fault of it or its network prevents that."""
    responsive_since: float = float("-inf")
    last_contact: float = 0.0
    """When contact last ended, after at least `CONTACT_S` without a fault."""
    unreachable_since: float | None = None
    """Since when it cannot be reached at all; None: it can."""
    in_maintenance: bool = False
    deadline_at: float = float("inf")
    cancelled_late_at: float = float("-inf")
    """When work was last cancelled after its deadline."""
    loan: StoredLoan | None = None

    def may_be_forced_out(self, now: float) -> bool:
        """Return whether tasks may be taken down by force: the deadline has passed.

        Writes decided before the work was cancelled may follow up to `REACTION_S` later.
        """
        return now >= self.deadline_at or now - self.cancelled_late_at < REACTION_S
