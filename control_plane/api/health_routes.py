"""Routes about the health of the region: silent machines, limits, a restored store."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.api.limits import Lift, LimitView, LimitViews
from control_plane.api.people import Needs
from control_plane.api.region_status import RegionStatus
from control_plane.api.restored import Restored, RestoredView
from wire.routes import Route

HEALTH_ROUTES: tuple[Route, ...] = (
    Route(
        "region_status",
        "GET",
        "/v1/status",
        response=RegionStatus,
        needs=Needs.VIEWER,
        summary="What is well and what is not: processes, shards, machines, tasks",
    ),
    Route(
        "shard_metrics",
        "GET",
        "/v1/shards/{shard}/metrics",
        stream_out=True,
        needs=Needs.VIEWER,
        summary="Metrics of the process of a shard, in Prometheus' text form",
    ),
    Route(
        "held_back_machines",
        "GET",
        "/v1/health/held-back",
        response=HeldBackMachines,
        needs=Needs.VIEWER,
        summary="Silent machines whose state is not decided yet, and why",
    ),
    Route(
        "confirm_down",
        "POST",
        "/v1/machines:confirm-down",
        request=ConfirmDown,
        response=ConfirmedDown,
        needs=Needs.OPERATOR,
        summary="Say that silent machines are down: nothing holds that back any more",
    ),
)


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


RESTORED_ROUTES: tuple[Route, ...] = (
    Route(
        "show_restored",
        "GET",
        "/v1/restored",
        response=RestoredView,
        needs=Needs.OPERATOR,
        summary="How the tasks on machines differ from the copy that the store was restored from",
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
