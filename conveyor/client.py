"""The client of the delivery service: one typed method per row of its route table."""

from __future__ import annotations

from conveyor.api import ControlRequest, PipelineSpec, StartRequest
from conveyor.routes import ROUTES
from conveyor.runs import PipelinePlan, PipelineView, PipelineViews, RunHistory
from wire.client import WireClient, answer_as
from wire.routes import Route

_ROUTE: dict[str, Route] = {r.name: r for r in ROUTES}


class ConveyorClient(WireClient):
    """Client of a delivery service; raises what the service raised, or `Unreachable`."""

    async def list_pipelines(self) -> PipelineViews:
        """Return all pipelines."""
        return answer_as(PipelineViews, await self.call(_ROUTE["list_pipelines"]))

    async def get_pipeline(self, name: str) -> PipelineView:
        """Return a pipeline, or raise `NotFound`."""
        return answer_as(PipelineView, await self.call(_ROUTE["get_pipeline"], pipeline=name))

    async def apply_pipeline(self, spec: PipelineSpec) -> PipelineView:
        """Create or change a pipeline."""
        answer = await self.call(_ROUTE["apply_pipeline"], spec, pipeline=spec.name)
        return answer_as(PipelineView, answer)

    async def remove_pipeline(self, name: str) -> None:
        """Remove a pipeline that has no run."""
        await self.call(_ROUTE["remove_pipeline"], pipeline=name)

    async def plan_pipeline(self, spec: PipelineSpec) -> PipelinePlan:
        """Return what applying a pipeline would change; changes nothing."""
        answer = await self.call(_ROUTE["plan_pipeline"], spec, pipeline=spec.name)
        return answer_as(PipelinePlan, answer)

    async def start_run(self, name: str, request: StartRequest) -> PipelineView:
        """Start a run by hand."""
        return answer_as(PipelineView, await self.call(_ROUTE["start_run"], request, pipeline=name))

    async def control_run(self, name: str, request: ControlRequest) -> PipelineView:
        """Approve, pause, resume, skip, roll back or abort."""
        return answer_as(
            PipelineView, await self.call(_ROUTE["control_run"], request, pipeline=name)
        )

    async def history(self, name: str, limit: int = 10, run: int | None = None) -> RunHistory:
        """Return the newest runs, or one, with every verdict."""
        answer = await self.call(_ROUTE["get_history"], pipeline=name, limit=limit, run=run)
        return answer_as(RunHistory, answer)
