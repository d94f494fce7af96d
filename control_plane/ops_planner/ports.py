"""What the ops planner needs of the brokers besides `Machines`: announcements.

`roles.py` hands it in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from control_plane.api.inventory import MachineScope
from control_plane.api.machines import EventKind, MachineRecord


class Announcements(Protocol):
    """Announces that machines will be unavailable, and withdraws announcements."""

    async def machines(self, names: Collection[str], scope: MachineScope | None) -> list[str]:
        """Return these machines and those of a scope, or raise `NotFound`."""

    async def plan_unavailability(
        self,
        machines: Collection[str],
        kind: EventKind,
        reason: str,
        start: float | None = None,
        deadline: float | None = None,
        expected_duration_s: float | None = None,
        *,
        tasks_survive: bool = False,
        plan: str = "",
    ) -> list[MachineRecord]:
        """Announce unavailability of machines; replaces an event of the same kind and plan."""

    async def end_plan(self, machines: Collection[str], plan: str) -> None:
        """End a plan's events of machines."""
