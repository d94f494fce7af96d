"""What operators ask of the health check service: the front end's side of it."""

from __future__ import annotations

from collections.abc import Collection

from agent.errors import InvalidInput
from control_plane.api.health import ConfirmedDown, HeldBack
from control_plane.api.inventory import MachineScope
from control_plane.broker.outages import Outages
from control_plane.health.checker import HealthChecker


class HealthDesk:
    """Shows what is held back, and takes the word of operators."""

    def __init__(self, checker: HealthChecker, outages: Outages) -> None:
        """`outages` knows which machines are in a scope."""
        self._checker, self._outages = checker, outages

    def held_back(self) -> list[HeldBack]:
        """Return all machines of which nothing is concluded yet, and why."""
        return self._checker.held_back()

    def count(self) -> int:
        """Return how many machines are held back."""
        return self._checker.held_count

    async def confirm(
        self, machines: Collection[str], scope: MachineScope | None, reason: str, caller: str
    ) -> ConfirmedDown:
        """Declare silent machines down whatever holds that back; `Conflict` if none is silent."""
        if not machines and scope is None:
            raise InvalidInput("name machines, or give a scope")
        names = await self._outages.machines(machines, scope)
        why = f"{caller} said so: {reason}"
        return ConfirmedDown(machines=self._checker.confirm_down(names, why))
