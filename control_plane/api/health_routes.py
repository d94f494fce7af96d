"""The front end's routes about the health of machines; joined into `api.routes`."""

from __future__ import annotations

from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.api.people import Needs
from control_plane.api.region_status import RegionStatus
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
