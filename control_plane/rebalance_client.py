"""The front end's client, the part about the whole region: status, shards, ReBalancer, loans."""

from __future__ import annotations

from collections.abc import AsyncIterator

from control_plane.api.capacity_routes import CAPACITY_ROUTES
from control_plane.api.elastic import Buffers, CapacitySignal, ElasticReport
from control_plane.api.health_routes import HEALTH_ROUTES
from control_plane.api.ownership import ShardLoads, ShardMove, ShardMoved
from control_plane.api.rebalancing import (
    MoveExplanation,
    PauseRequest,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.api.rebalancing_routes import REBALANCING_ROUTES
from control_plane.api.region_status import RegionStatus
from wire.client import WireClient, answer_as
from wire.routes import Route

_ROUTES = (*REBALANCING_ROUTES, *CAPACITY_ROUTES, *HEALTH_ROUTES)
_ROUTE: dict[str, Route] = {route.name: route for route in _ROUTES}
PLAN_TIMEOUT_S = 300.0
"""The solver has tens of seconds, and plans for two callers wait for each other."""


class RebalanceClient(WireClient):
    """Reads the region's status, moves entitlements between shards, controls the ReBalancer.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def rebalance_status(self) -> RebalanceStatus:
        """Return what the ReBalancer does, and its plan."""
        return answer_as(RebalanceStatus, await self.call(_ROUTE["rebalance_status"]))

    async def plan_rebalance(self) -> RebalancePlan:
        """Return what the ReBalancer would move now; a large region takes a minute."""
        answer = await self.call(_ROUTE["plan_rebalance"], timeout_s=PLAN_TIMEOUT_S)
        return answer_as(RebalancePlan, answer)

    async def rebalance_history(self) -> RebalanceHistory:
        """Return the ReBalancer's moves that ended."""
        return answer_as(RebalanceHistory, await self.call(_ROUTE["rebalance_history"]))

    async def explain_rebalance(self, move: str) -> MoveExplanation:
        """Return why a task is moved, and the progress of the move."""
        return answer_as(MoveExplanation, await self.call(_ROUTE["explain_rebalance"], move=move))

    async def pause_rebalance(self, request: PauseRequest) -> RebalanceStatus:
        """Pause the ReBalancer: it begins no further moves."""
        return answer_as(RebalanceStatus, await self.call(_ROUTE["pause_rebalance"], request))

    async def resume_rebalance(self) -> RebalanceStatus:
        """Resume the ReBalancer."""
        return answer_as(RebalanceStatus, await self.call(_ROUTE["resume_rebalance"]))

    async def get_elastic(self) -> ElasticReport:
        """Return the loans, the waiting entitlements, and how promises were kept."""
        return answer_as(ElasticReport, await self.call(_ROUTE["get_elastic"]))

    async def get_buffers(self) -> Buffers:
        """Return the spare machines that the region needs."""
        return answer_as(Buffers, await self.call(_ROUTE["get_buffers"]))

    async def get_signal(self, entitlement: str) -> CapacitySignal:
        """Return whether a borrower has the machines that it wants."""
        answer = await self.call(_ROUTE["get_signal"], entitlement=entitlement)
        return answer_as(CapacitySignal, answer)

    async def region_status(self) -> RegionStatus:
        """Return what works and what does not."""
        return answer_as(RegionStatus, await self.call(_ROUTE["region_status"]))

    def shard_metrics(self, shard: int) -> AsyncIterator[bytes]:
        """Yield the metrics of the process of a shard, in Prometheus' text form."""
        return self.stream(_ROUTE["shard_metrics"], shard=str(shard))

    async def list_shards(self) -> ShardLoads:
        """Return the shards and the load of each."""
        return answer_as(ShardLoads, await self.call(_ROUTE["list_shards"]))

    async def move_entitlement(self, name: str, to: int, *, dry_run: bool = False) -> ShardMoved:
        """Give an entitlement to another shard."""
        route, dry = _ROUTE["move_entitlement"], "true" if dry_run else None
        answer = await self.call(
            route, ShardMove(to=to), timeout_s=60.0, entitlement=name, dry_run=dry
        )
        return answer_as(ShardMoved, answer)
