"""What the ReBalancer needs of the roles beside it; `roles.py` hands it in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Request
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer

Solve = Callable[[RegionModel, Effort], Awaitable[SolverAnswer]]
"""Solves a model without keeping this process busy; `Unavailable` if that cannot be done."""


class FreeMachines(Protocol):
    """What pools may take of the free machines."""

    def allowance(self, request: Request) -> Allowance:
        """Return what the pool of a request may take for it."""


class IndexedPlaces(Protocol):
    """What is known of places: the allocator. Nothing is claimed here."""

    @property
    def index(self) -> RegionIndex:
        """Return the machines of the region and what is claimed of them."""

    @property
    def quotas(self) -> FreeMachines:
        """Return what pools may take."""

    def entitlement_of(self, spec: JobSpec) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""


class Moves(Protocol):
    """Takes moves in as operations of jobs: the scheduler."""

    async def begin(self, job: str, index: int, to: str, reason: str) -> bool:
        """Have a task move within its job's budget; return whether that was taken in."""

    async def withdraw(self, job: str, index: int) -> None:
        """Take a move back that has not begun; one that has goes on."""

    def moving(self, job: str, index: int) -> str:
        """Return where the ReBalancer has a task move; empty: nowhere now."""

    def has_begun(self, job: str, index: int) -> bool:
        """Return whether a task is on its way."""

    def serves_on(self, job: str, index: int) -> str:
        """Return the machine on which a task serves; empty: it does not."""

    def waiting(self) -> list[tuple[str, int]]:
        """Return the moves that have not begun."""


Loads = Mapping[str, tuple[float, float, float]]
"""Task → what it uses; tasks that are missing were not measured."""
