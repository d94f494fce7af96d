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
        summary="State of the region: processes, shards, machines, tasks, and troubles",
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
        summary="Silent machines whose state is not decided yet, with the reason",
    ),
    Route(
        "confirm_down",
        "POST",
        "/v1/machines:confirm-down",
        request=ConfirmDown,
        response=ConfirmedDown,
        needs=Needs.OPERATOR,
        summary="Confirm that silent machines are down; limits no longer hold it back",
    ),
)


LIMIT_ROUTES: tuple[Route, ...] = (
    Route(
        "list_limits",
        "GET",
        "/v1/limits",
        response=LimitViews,
        needs=Needs.VIEWER,
        summary="Limits on destructive operations, and what they hold back",
    ),
    Route(
        "lift_limit",
        "POST",
        "/v1/limits/{limit}/lift",
        request=Lift,
        response=LimitView,
        needs=Needs.OPERATOR,
        summary="Lift a limit for a while, or restore it",
    ),
)


RESTORED_ROUTES: tuple[Route, ...] = (
    Route(
        "show_restored",
        "GET",
        "/v1/restored",
        response=RestoredView,
        needs=Needs.OPERATOR,
        summary="Differences between the tasks on machines and the restored copy of the store",
    ),
    Route(
        "release_restored",
        "POST",
        "/v1/restored:release",
        response=Restored,
        needs=Needs.OPERATOR,
        summary="Let the control plane act on the restored store",
    ),
    Route(
        "let_task_go",
        "POST",
        "/v1/machines/{machine}/unknown-tasks/{unknown}:let-go",
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Permit the stop of a task that the restored store does not contain",
    ),
)
