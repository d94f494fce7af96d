"""The part of the front end's client about where machines and tasks go: ReBalancer and loans."""

from __future__ import annotations

from typing import TypeVar

from control_plane.api.capacity_routes import CAPACITY_ROUTES
from control_plane.api.elastic import Buffers, CapacitySignal, ElasticReport
from control_plane.api.rebalancing import (
    MoveExplanation,
    PauseWish,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.api.rebalancing_routes import REBALANCING_ROUTES
from wire.client import WireClient
from wire.routes import Route

_T = TypeVar("_T")
_ROUTE: dict[str, Route] = {route.name: route for route in (*REBALANCING_ROUTES, *CAPACITY_ROUTES)}
PLAN_TIMEOUT_S = 300.0
"""The solver has tens of seconds, and plans for two callers wait for each other."""


class RebalanceClient(WireClient):
    """Asks what the ReBalancer would do and does, and pauses it; asks what is lent.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def rebalance_status(self) -> RebalanceStatus:
        """Return what the ReBalancer does, and its plan."""
        return _as(RebalanceStatus, await self.call(_ROUTE["rebalance_status"]))

    async def plan_rebalance(self) -> RebalancePlan:
        """Return what the ReBalancer would move now; a large region takes a minute."""
        answer = await self.call(_ROUTE["plan_rebalance"], timeout_s=PLAN_TIMEOUT_S)
        return _as(RebalancePlan, answer)

    async def rebalance_history(self) -> RebalanceHistory:
        """Return the ReBalancer's moves that ended."""
        return _as(RebalanceHistory, await self.call(_ROUTE["rebalance_history"]))

    async def explain_rebalance(self, move: str) -> MoveExplanation:
        """Return why a task is moved, and how far that is."""
        return _as(MoveExplanation, await self.call(_ROUTE["explain_rebalance"], move=move))

    async def pause_rebalance(self, wish: PauseWish) -> RebalanceStatus:
        """Have the ReBalancer begin no more moves."""
        return _as(RebalanceStatus, await self.call(_ROUTE["pause_rebalance"], wish))

    async def resume_rebalance(self) -> RebalanceStatus:
        """Let the ReBalancer go on."""
        return _as(RebalanceStatus, await self.call(_ROUTE["resume_rebalance"]))

    async def get_elastic(self) -> ElasticReport:
        """Return what is lent to whom, who waits, and how promises were kept."""
        return _as(ElasticReport, await self.call(_ROUTE["get_elastic"]))

    async def get_buffers(self) -> Buffers:
        """Return the spare machines that the region needs."""
        return _as(Buffers, await self.call(_ROUTE["get_buffers"]))

    async def get_signal(self, entitlement: str) -> CapacitySignal:
        """Return whether a borrower has the machines that it wants."""
        answer = await self.call(_ROUTE["get_signal"], entitlement=entitlement)
        return _as(CapacitySignal, answer)


def _as(kind: type[_T], value: object) -> _T:
    assert isinstance(value, kind)
    return value
