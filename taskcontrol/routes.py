"""The route table of a controller, which the scheduler calls."""

from __future__ import annotations

from taskcontrol.api import TaskControlRequest, TaskControlResponse
from wire.routes import Route

PROCESS = Route(
    "process",
    "POST",
    "/v1/process",
    request=TaskControlRequest,
    response=TaskControlResponse,
    roles=("component",),
    summary="Which of these operations may begin now",
)
ROUTES: tuple[Route, ...] = (PROCESS,)
