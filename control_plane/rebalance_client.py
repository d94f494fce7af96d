"""The part of the front end's client about the whole region: status, shards, ReBalancer, loans."""

from __future__ import annotations

from collections.abc import AsyncIterator

from control_plane.api.elastic import Buffers, CapacitySignal, ElasticReport
from control_plane.api.ownership import ShardLoads, ShardMove, ShardMoved
from control_plane.api.rebalancing import (
    MoveExplanation,
    PauseRequest,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.api.region_status import RegionStatus
from control_plane.route_calls import ROUTE, NamedCalls

PLAN_TIMEOUT_S = 300.0
"""The solver has tens of seconds, and plans for two callers wait for each other."""


class RebalanceClient(NamedCalls):
    """Reads the region's status, moves entitlements between shards, controls the ReBalancer.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def rebalance_status(self) -> RebalanceStatus:
        """Return what the ReBalancer does, and its plan."""
        return await self.ask(RebalanceStatus, "rebalance_status")

    async def plan_rebalance(self) -> RebalancePlan:
        """Return what the ReBalancer would move now; a large region takes a minute."""
        return await self.ask(RebalancePlan, "plan_rebalance", timeout_s=PLAN_TIMEOUT_S)

    async def rebalance_history(self) -> RebalanceHistory:
        """Return the ReBalancer's moves that ended."""
        return await self.ask(RebalanceHistory, "rebalance_history")

    async def explain_rebalance(self, move: str) -> MoveExplanation:
        """Return why a task is moved, and the progress of the move."""
        return await self.ask(MoveExplanation, "explain_rebalance", move=move)

    async def pause_rebalance(self, request: PauseRequest) -> RebalanceStatus:
        """Pause the ReBalancer: it begins no further moves."""
        return await self.ask(RebalanceStatus, "pause_rebalance", request)

    async def resume_rebalance(self) -> RebalanceStatus:
        """Resume the ReBalancer."""
        return await self.ask(RebalanceStatus, "resume_rebalance")

    async def get_elastic(self) -> ElasticReport:
        """Return the loans, the waiting entitlements, and how promises were kept."""
        return await self.ask(ElasticReport, "get_elastic")

    async def get_buffers(self) -> Buffers:
        """Return the spare machines that the region needs."""
        return await self.ask(Buffers, "get_buffers")

    async def get_signal(self, entitlement: str) -> CapacitySignal:
        """Return whether a borrower has the machines that it wants."""
        return await self.ask(CapacitySignal, "get_signal", entitlement=entitlement)

    async def region_status(self) -> RegionStatus:
        """Return what works and what does not."""
        return await self.ask(RegionStatus, "region_status")

    def shard_metrics(self, shard: int) -> AsyncIterator[bytes]:
        """Yield the metrics of the process of a shard, in Prometheus' text form."""
        return self.stream(ROUTE["shard_metrics"], shard=str(shard))

    async def list_shards(self) -> ShardLoads:
        """Return the shards and the load of each."""
        return await self.ask(ShardLoads, "list_shards")

    async def move_entitlement(self, name: str, to: int, *, dry_run: bool = False) -> ShardMoved:
        """Give an entitlement to another shard."""
        dry = "true" if dry_run else None
        return await self.ask(
            ShardMoved,
            "move_entitlement",
            ShardMove(to=to),
            timeout_s=60.0,
            entitlement=name,
            dry_run=dry,
        )
