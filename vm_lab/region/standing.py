"""What the checker knows of each machine, and how late the control plane may know the same."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

LAG_S = 20.0
"""Age in s up to which the control plane may not have noticed an event."""
POLL_S = 4.0
"""Seconds by which a machine's last sign of life may be older than its silence."""
TALK_S = 8.0
"""Seconds without trouble after which contact with a machine is certain."""
NEWS_S = 3.0
"""Seconds that it may take to act on a stored change."""


class StoredLoan(msgspec.Struct, frozen=True):
    """What is read of the loan of a stored machine."""

    since: float
    promise_s: float = 0.0
    revoked_at: float | None = None


class StoredMachine(msgspec.Struct):
    """What is read of a stored machine."""

    machine: str
    entitlement: str = ""
    state: str = "up"
    loan: StoredLoan | None = None


@dataclass(slots=True)
class CheckerStanding:
    """The checker's state of one machine."""

    store: str = ""
    entitlement: str = ""
    state: str = "up"
    up_since: float = 0.0
    down_since: float = 0.0
    sound: bool = True
    """Whether it can answer in time: no fault of it or its network prevents that."""
    sound_since: float = float("-inf")
    heard_at: float = 0.0
    """When contact was last certain, if there is none now: after `TALK_S` without trouble."""
    gone_since: float | None = None
    """Since when it cannot be reached at all."""
    drained: bool = False
    overdue_at: float = float("inf")
    excused_at: float = float("-inf")
    """When work was called off last that had begun."""
    loan: StoredLoan | None = None

    def overdue(self, now: float) -> bool:
        """Return whether its tasks may go whatever else is said.

        What was decided before the work was called off may be written a moment after.
        """
        return now >= self.overdue_at or now - self.excused_at < NEWS_S
