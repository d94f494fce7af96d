"""The front end's handlers about the health of machines."""

from __future__ import annotations

from control_plane.api.health import ConfirmedDown, HeldBackMachines
from control_plane.health.service import HealthService
from wire.server import Call


class HealthHandlers:
    """A handler for each row of `api.health_routes`."""

    def __init__(self, service: HealthService) -> None:
        """Take what the handlers call."""
        self._health = service

    async def held_back_machines(self, _: Call) -> HeldBackMachines:
        """List what is held back."""
        return HeldBackMachines(machines=self._health.held_back())

    async def confirm_down(self, call: Call) -> ConfirmedDown:
        """Take an operator's word."""
        wish = call.body
        return await self._health.confirm(wish.machines, wish.scope, wish.reason, call.peer.name)
