"""The route table of a controller: what the scheduler calls."""

from __future__ import annotations

from agent.wire.routes import Route
from taskcontrol.api import TaskControlRequest, TaskControlResponse

PROCESS = Route(
    "process",
    "POST",
    "/v1/process",
    request=TaskControlRequest,
    response=TaskControlResponse,
    roles=("component",),
    summary="Which of these operations may be done now?",
)
ROUTES: tuple[Route, ...] = (PROCESS,)
