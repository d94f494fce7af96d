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
from control_plane.api.route_rows import operator_row, viewer_row
from wire.fairness import MAX_BODY_BYTES
from wire.routes import Route

_PLAN = "/v1/maintenance/{plan}"

MAINTENANCE_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "list_plans", "/v1/maintenance", Plans, "Plans of work on machines, the newest first"
    ),
    viewer_row("get_plan", _PLAN, PlanView, "One plan with all its waves"),
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
    operator_row(
        "accept_plan",
        f"PUT {_PLAN}",
        PlanView,
        "Announce planned work on machines, wave by wave",
        request=MaintenanceRequest,
    ),
    operator_row(
        "cancel_plan", f"DELETE {_PLAN}", PlanView, "Cancel planned work; its announced events end"
    ),
    operator_row(
        "report_plan",
        f"POST {_PLAN}/done",
        PlanView,
        "Report that the work on some machines of a plan is over",
        request=Reported,
    ),
    operator_row(
        "resume_plan",
        f"POST {_PLAN}/resume",
        PlanView,
        "Resume a paused plan, if necessary without machines that are not back",
        request=GoOn,
    ),
)
