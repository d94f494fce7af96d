"""The front end's routes about rate limits; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.limits import Lift, LimitView, LimitViews
from control_plane.api.people import Needs
from wire.routes import Route

LIMIT_ROUTES: tuple[Route, ...] = (
    Route(
        "list_limits",
        "GET",
        "/v1/limits",
        response=LimitViews,
        needs=Needs.VIEWER,
        summary="Limits on what destroys, and what they hold back",
    ),
    Route(
        "lift_limit",
        "POST",
        "/v1/limits/{limit}/lift",
        request=Lift,
        response=LimitView,
        needs=Needs.OPERATOR,
        summary="Lift a limit for a while, or have it hold again",
    ),
)
