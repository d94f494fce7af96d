"""The front end's routes about the ReBalancer; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.people import Needs
from control_plane.api.rebalancing import (
    MoveExplanation,
    PauseRequest,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.api.route_rows import operator_row, viewer_row
from wire.routes import Route

_REBALANCE = "/v1/rebalance"

REBALANCING_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "rebalance_status", _REBALANCE, RebalanceStatus, "State of the ReBalancer, and its plan"
    ),
    Route(
        "plan_rebalance",
        "POST",
        f"{_REBALANCE}/plan",
        response=RebalancePlan,
        is_costly=True,
        needs=Needs.VIEWER,
        changes=False,
        summary="Moves that the ReBalancer would make now; changes nothing",
    ),
    viewer_row(
        "rebalance_history",
        f"{_REBALANCE}/history",
        RebalanceHistory,
        "The ReBalancer's moves that ended, the newest first",
    ),
    viewer_row(
        "explain_rebalance",
        f"{_REBALANCE}/moves/{{move}}",
        MoveExplanation,
        "Reason and progress of a move; with `model`, the goals and constraints behind it",
    ),
    operator_row(
        "pause_rebalance",
        f"POST {_REBALANCE}/pause",
        RebalanceStatus,
        "Pause the ReBalancer: it begins no further moves",
        request=PauseRequest,
    ),
    operator_row(
        "resume_rebalance", f"POST {_REBALANCE}/resume", RebalanceStatus, "Resume the ReBalancer"
    ),
)
