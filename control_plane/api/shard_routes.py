"""Routes that the process of a shard serves, to the core alone: rows of the front end's table."""

from __future__ import annotations

import dataclasses

from agent.api import Ack
from control_plane.api.maintenance import PlacesFound, PlacesRequest
from control_plane.api.region_status import ProcessStatus
from control_plane.api.routes import ROUTES
from wire.routes import Route

REVISION_HEADER = "Twine-Revision"
"""Of a request: the store revision that the core had written. Of an answer: the shard's."""
CORE_HEADER = "Twine-Core"
"""Of a request: the life of the core that sends it. A shard refuses a core that was replaced."""
CALLER_HEADER = "Twine-Caller"
"""Of a request: the caller for which the core sends it, as the audit log names it."""

FORWARDED = frozenset(
    (
        *("apply_job", "plan_job", "explain_job", "get_job", "stop_job", "pause_job", "resume_job"),
        *("restart_job", "rollback_job", "move_job", "move_task", "restart_task", "exec_task"),
        *("get_intents", "put_push", "put_size", "put_canary", "put_hold", "put_infrastructure"),
        "withdraw_intent",
    )
)
"""Rows about one job: the process of its shard serves them, the core all others about jobs."""
_MERGED = frozenset(
    ("list_jobs", "list_machines", "map_region", "get_machine", "healthz", "readyz")
)
_OF_PROCESS = frozenset(("shard_metrics",))
"""Rows about the process of a shard."""

RELEASE_IDLE = Route(
    "release_idle",
    "POST",
    "/v1/entitlements/{entitlement}/idle",
    response=Ack,
    roles=("component",),
    summary="Release the machines of an entitlement that have no tasks",
)
PROCESS_STATUS = Route(
    "process_status",
    "GET",
    "/v1/process",
    response=ProcessStatus,
    roles=("component",),
    summary="State of this process",
)
FIND_PLACES = Route(
    "find_places",
    "POST",
    "/v1/places",
    request=PlacesRequest,
    response=PlacesFound,
    roles=("component",),
    summary="Number of tasks of jobs that would find no other machine",
)
SHARD_ROUTES: tuple[Route, ...] = (
    *(
        dataclasses.replace(route, roles=("component",), needs="")
        for route in ROUTES
        if route.name in FORWARDED | _MERGED | _OF_PROCESS
    ),
    RELEASE_IDLE,
    PROCESS_STATUS,
    FIND_PLACES,
)
