"""The front end's handlers about planned work on machines, and about the ReBalancer's plans."""

from __future__ import annotations

from control_plane.api.maintenance import Plans, PlanView, Preview
from control_plane.api.rebalancing import (
    MoveExplanation,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.ops_planner.planner import OpsPlanner
from control_plane.rebalancer.planning import MODEL
from control_plane.rebalancer.rebalancer import ReBalancer
from wire.peers import principal
from wire.server import Call


class MaintenanceHandlers:
    """A handler for each row of `api.maintenance_routes`."""

    def __init__(self, planner: OpsPlanner) -> None:
        self._planner = planner

    async def list_plans(self, _: Call) -> Plans:
        """List all plans."""
        return Plans(plans=self._planner.every())

    async def get_plan(self, call: Call) -> PlanView:
        """Show a plan."""
        return self._planner.show(call.path["plan"])

    async def preview_plan(self, call: Call) -> Preview:
        """Show what a plan would do."""
        return await self._planner.preview(call.path["plan"], call.body)

    async def accept_plan(self, call: Call) -> PlanView:
        """Accept a plan."""
        by = principal(call.peer) if call.peer.role == "user" else call.peer.name
        return await self._planner.accept(call.path["plan"], call.body, by)

    async def cancel_plan(self, call: Call) -> PlanView:
        """Cancel a plan."""
        return await self._planner.cancel(call.path["plan"])

    async def report_plan(self, call: Call) -> PlanView:
        """Record that work is over."""
        return await self._planner.report(call.path["plan"], call.body.machines)

    async def resume_plan(self, call: Call) -> PlanView:
        """Continue a plan."""
        return await self._planner.go_on(call.path["plan"], call.body)


class RebalanceHandlers:
    """A handler for each row of `api.rebalancing_routes`."""

    def __init__(self, rebalancer: ReBalancer) -> None:
        self._rebalancer = rebalancer

    async def rebalance_status(self, _: Call) -> RebalanceStatus:
        """Show what the ReBalancer does now."""
        return self._rebalancer.status()

    async def plan_rebalance(self, _: Call) -> RebalancePlan:
        """Show what would be moved."""
        return await self._rebalancer.plan()

    async def rebalance_history(self, _: Call) -> RebalanceHistory:
        """List past moves."""
        return self._rebalancer.history()

    async def explain_rebalance(self, call: Call) -> MoveExplanation:
        """Explain one move, or the model."""
        if call.path["move"] == MODEL:
            return await self._rebalancer.planner.explain()
        return self._rebalancer.explain(call.path["move"])

    async def pause_rebalance(self, call: Call) -> RebalanceStatus:
        """Pause moves."""
        by = principal(call.peer) if call.peer.role == "user" else call.peer.name
        return await self._rebalancer.pause(call.body, by)

    async def resume_rebalance(self, _: Call) -> RebalanceStatus:
        """Continue."""
        return await self._rebalancer.resume()
