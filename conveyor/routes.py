"""The route table of the delivery service."""

from __future__ import annotations

from conveyor.api import ControlRequest, PipelineSpec, StartRequest
from conveyor.pipeline_file import pipeline_relations
from conveyor.runs import PipelinePlan, PipelineView, PipelineViews, RunHistory
from wire.routes import Route

IDENTITY = "/controller/conveyor"
"""Identity in the service's certificate: `twine-control-plane controller add conveyor`."""
_PATH = "/v1/pipelines/{pipeline}"
READS = "reader"
"""Every user with a credential of the cluster."""
WRITES = "writer"
"""Users that the service's configuration names, and its local socket."""

ROUTES: tuple[Route, ...] = (
    Route(
        "list_pipelines",
        "GET",
        "/v1/pipelines",
        response=PipelineViews,
        needs=READS,
        summary="All pipelines and their runs",
    ),
    Route(
        "get_pipeline",
        "GET",
        _PATH,
        response=PipelineView,
        needs=READS,
        summary="One pipeline and its run",
    ),
    Route(
        "apply_pipeline",
        "PUT",
        _PATH,
        request=PipelineSpec,
        response=PipelineView,
        needs=WRITES,
        relations=pipeline_relations,
        summary="Create or change a pipeline",
    ),
    Route(
        "remove_pipeline",
        "DELETE",
        _PATH,
        needs=WRITES,
        summary="Remove a pipeline that has no run",
    ),
    Route(
        "plan_pipeline",
        "POST",
        f"{_PATH}/plan",
        request=PipelineSpec,
        response=PipelinePlan,
        needs=READS,
        changes=False,
        relations=pipeline_relations,
        summary="What applying a file would change",
    ),
    Route(
        "start_run",
        "POST",
        f"{_PATH}/runs",
        request=StartRequest,
        response=PipelineView,
        needs=WRITES,
        summary="Start a run by hand",
    ),
    Route(
        "control_run",
        "POST",
        f"{_PATH}/control",
        request=ControlRequest,
        response=PipelineView,
        needs=WRITES,
        summary="Approve, pause, resume, skip, roll back or abort",
    ),
    Route(
        "get_history",
        "GET",
        f"{_PATH}/runs",
        response=RunHistory,
        query=("limit", "run"),
        needs=READS,
        summary="Runs, newest first, with 500 verdicts each, or one run with all",
    ),
)
