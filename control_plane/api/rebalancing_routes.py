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
from wire.routes import Route

_REBALANCE = "/v1/rebalance"

REBALANCING_ROUTES: tuple[Route, ...] = (
    Route(
        "rebalance_status",
        "GET",
        _REBALANCE,
        response=RebalanceStatus,
        needs=Needs.VIEWER,
        summary="State of the ReBalancer, and its plan",
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
    Route(
        "rebalance_history",
        "GET",
        f"{_REBALANCE}/history",
        response=RebalanceHistory,
        needs=Needs.VIEWER,
        summary="The ReBalancer's moves that ended, the newest first",
    ),
    Route(
        "explain_rebalance",
        "GET",
        f"{_REBALANCE}/moves/{{move}}",
        response=MoveExplanation,
        needs=Needs.VIEWER,
        summary=(
            "Reason and progress of a move; with `model`, the goals and constraints behind it"
        ),
    ),
    Route(
        "pause_rebalance",
        "POST",
        f"{_REBALANCE}/pause",
        request=PauseRequest,
        response=RebalanceStatus,
        needs=Needs.OPERATOR,
        summary="Pause the ReBalancer: it begins no further moves",
    ),
    Route(
        "resume_rebalance",
        "POST",
        f"{_REBALANCE}/resume",
        response=RebalanceStatus,
        needs=Needs.OPERATOR,
        summary="Resume the ReBalancer",
    ),
)
