"""The front end's side of the health check service: requests of operators."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from control_plane.api.health import ConfirmedDown, HeldBack
from control_plane.api.inventory import MachineScope
from control_plane.health.checker import HealthChecker
from wire.errors import InvalidInput


class Scopes(Protocol):
    """Which machines are where: the broker."""

    async def machines(self, names: Collection[str], scope: MachineScope | None) -> list[str]:
        """Return the machines that are named or in the scope; `NotFound` if there are none."""


class HealthService:
    """Shows what is held back, and accepts confirmations of operators."""

    def __init__(self, checker: HealthChecker, scopes: Scopes) -> None:
        self._checker, self._scopes = checker, scopes

    def held_back(self) -> list[HeldBack]:
        """Return all machines without a verdict yet, and why."""
        return self._checker.held_back()

    def count(self) -> int:
        """Return how many machines are held back."""
        return len(self._checker.held)

    async def confirm(
        self, machines: Collection[str], scope: MachineScope | None, reason: str, caller: str
    ) -> ConfirmedDown:
        """Declare silent machines down even if held back; `Conflict` if none is silent."""
        if not machines and scope is None:
            raise InvalidInput("name machines, or give a scope")
        names = await self._scopes.machines(machines, scope)
        why = f"confirmed by {caller}: {reason}"
        return ConfirmedDown(machines=self._checker.confirm_down(names, why))
