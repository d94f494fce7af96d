"""The front end's routes about planned work on machines; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.maintenance import (
    GoOn,
    MaintenanceRequest,
    Plans,
    PlanView,
    Preview,
    Reported,
)
from control_plane.api.people import Needs
from wire.fairness import MAX_BODY_BYTES
from wire.routes import Route

_PLAN = "/v1/maintenance/{plan}"

MAINTENANCE_ROUTES: tuple[Route, ...] = (
    Route(
        "list_plans",
        "GET",
        "/v1/maintenance",
        response=Plans,
        needs=Needs.VIEWER,
        summary="Plans of work on machines, the newest first",
    ),
    Route(
        "get_plan",
        "GET",
        _PLAN,
        response=PlanView,
        needs=Needs.VIEWER,
        summary="One plan with all its waves",
    ),
    Route(
        "preview_plan",
        "POST",
        f"{_PLAN}/preview",
        request=MaintenanceRequest,
        response=Preview,
        body_bytes=MAX_BODY_BYTES,
        is_costly=True,
        needs=Needs.VIEWER,
        changes=False,
        summary="Effect of planned work on jobs; changes nothing",
    ),
    Route(
        "accept_plan",
        "PUT",
        _PLAN,
        request=MaintenanceRequest,
        response=PlanView,
        needs=Needs.OPERATOR,
        summary="Announce planned work on machines, wave by wave",
    ),
    Route(
        "cancel_plan",
        "DELETE",
        _PLAN,
        response=PlanView,
        needs=Needs.OPERATOR,
        summary="Cancel planned work; its announced events end",
    ),
    Route(
        "report_plan",
        "POST",
        f"{_PLAN}/done",
        request=Reported,
        response=PlanView,
        needs=Needs.OPERATOR,
        summary="Report that the work on some machines of a plan is over",
    ),
    Route(
        "resume_plan",
        "POST",
        f"{_PLAN}/resume",
        request=GoOn,
        response=PlanView,
        needs=Needs.OPERATOR,
        summary="Resume a paused plan, if necessary without machines that are not back",
    ),
)
