"""The front end's rows about a store that was put back from a copy; joined into `api.routes`."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.people import Needs
from control_plane.api.restored import Restored, RestoredView
from wire.routes import Route

RESTORED_ROUTES: tuple[Route, ...] = (
    Route(
        "show_restored",
        "GET",
        "/v1/restored",
        response=RestoredView,
        needs=Needs.OPERATOR,
        summary="How the tasks on machines differ from the copy that the store was put back from",
    ),
    Route(
        "release_restored",
        "POST",
        "/v1/restored:release",
        response=Restored,
        needs=Needs.OPERATOR,
        summary="Let what the restored store wants be done from now on",
    ),
    Route(
        "let_task_go",
        "POST",
        "/v1/machines/{machine}/unknown-tasks/{unknown}:let-go",
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Let a task be stopped that the restored store does not know",
    ),
)
