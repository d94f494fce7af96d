"""Routes about the health of the region: silent machines, limits, a restored store."""

from __future__ import annotations

from agent.api import Ack
from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.api.limits import Lift, LimitView, LimitViews
from control_plane.api.people import Needs
from control_plane.api.region_status import RegionStatus
from control_plane.api.restored import Restored, RestoredView
from control_plane.api.route_rows import operator_row, viewer_row
from wire.routes import Route

HEALTH_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "region_status",
        "/v1/status",
        RegionStatus,
        "State of the region: processes, shards, machines, tasks, and troubles",
    ),
    Route(
        "shard_metrics",
        "GET",
        "/v1/shards/{shard}/metrics",
        stream_out=True,
        needs=Needs.VIEWER,
        summary="Metrics of the process of a shard, in Prometheus' text form",
    ),
    viewer_row(
        "held_back_machines",
        "/v1/health/held-back",
        HeldBackMachines,
        "Silent machines whose state is not decided yet, with the reason",
    ),
    operator_row(
        "confirm_down",
        "POST /v1/machines:confirm-down",
        ConfirmedDown,
        "Confirm that silent machines are down; limits no longer hold it back",
        request=ConfirmDown,
    ),
)


LIMIT_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "list_limits",
        "/v1/limits",
        LimitViews,
        "Limits on destructive operations, and what they hold back",
    ),
    operator_row(
        "lift_limit",
        "POST /v1/limits/{limit}/lift",
        LimitView,
        "Lift a limit for a while, or restore it",
        request=Lift,
    ),
)


RESTORED_ROUTES: tuple[Route, ...] = (
    operator_row(
        "show_restored",
        "GET /v1/restored",
        RestoredView,
        "Differences between the tasks on machines and the restored copy of the store",
    ),
    operator_row(
        "release_restored",
        "POST /v1/restored:release",
        Restored,
        "Let the control plane act on the restored store",
    ),
    operator_row(
        "let_task_go",
        "POST /v1/machines/{machine}/unknown-tasks/{unknown}:let-go",
        Ack,
        "Permit the stop of a task that the restored store does not contain",
    ),
)
