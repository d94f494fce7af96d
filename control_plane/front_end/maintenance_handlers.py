"""The front end's handlers about planned work on machines, and about the ReBalancer's plans."""

from __future__ import annotations

from control_plane.api.maintenance import Plans, PlanView, Preview
from control_plane.api.rebalancing import (
    MoveExplanation,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.front_end.handlers import PlaneHandlers
from control_plane.rebalancer.planning import MODEL
from wire.peers import principal
from wire.server import Call


class MaintenanceHandlers(PlaneHandlers):
    """A handler for each row of `api.maintenance_routes`."""

    async def list_plans(self, _: Call) -> Plans:
        """List all plans."""
        return Plans(plans=self._plane.maintenance.list_plans())

    async def get_plan(self, call: Call) -> PlanView:
        """Show a plan."""
        return self._plane.maintenance.show(call.path["plan"])

    async def preview_plan(self, call: Call) -> Preview:
        """Show what a plan would do."""
        return await self._plane.maintenance.preview(call.path["plan"], call.body)

    async def accept_plan(self, call: Call) -> PlanView:
        """Accept a plan."""
        by = principal(call.peer)
        return await self._plane.maintenance.accept(call.path["plan"], call.body, by)

    async def cancel_plan(self, call: Call) -> PlanView:
        """Cancel a plan."""
        return await self._plane.maintenance.cancel(call.path["plan"])

    async def report_plan(self, call: Call) -> PlanView:
        """Record that work is over."""
        return await self._plane.maintenance.report(call.path["plan"], call.body.machines)

    async def resume_plan(self, call: Call) -> PlanView:
        """Continue a plan."""
        return await self._plane.maintenance.continue_plan(call.path["plan"], call.body)


class RebalanceHandlers(PlaneHandlers):
    """A handler for each row of `api.rebalancing_routes`."""

    async def rebalance_status(self, _: Call) -> RebalanceStatus:
        """Show what the ReBalancer does now."""
        return self._plane.rebalancer.status()

    async def plan_rebalance(self, _: Call) -> RebalancePlan:
        """Show what would be moved."""
        return await self._plane.rebalancer.plan()

    async def rebalance_history(self, _: Call) -> RebalanceHistory:
        """List past moves."""
        return self._plane.rebalancer.history()

    async def explain_rebalance(self, call: Call) -> MoveExplanation:
        """Explain one move, or the model."""
        if call.path["move"] == MODEL:
            return await self._plane.rebalancer.planner.explain()
        return self._plane.rebalancer.explain(call.path["move"])

    async def pause_rebalance(self, call: Call) -> RebalanceStatus:
        """Pause moves."""
        return await self._plane.rebalancer.pause(call.body, principal(call.peer))

    async def resume_rebalance(self, _: Call) -> RebalanceStatus:
        """Continue."""
        return await self._plane.rebalancer.resume()
