"""The front end's route table."""

from __future__ import annotations

from agent.api import Ack, ImageInfo, Images, ImageSignature, Liveness, NamedImage
from agent.routes import JOIN_ROUTES
from control_plane.api.capacity_routes import CAPACITY_ROUTES, PROFILE_ROUTES
from control_plane.api.endpoints import Endpoints
from control_plane.api.health_routes import HEALTH_ROUTES, LIMIT_ROUTES, RESTORED_ROUTES
from control_plane.api.intent_routes import INTENT_ROUTES
from control_plane.api.jobs import Jobs, JobSpec, JobStatus
from control_plane.api.machine_routes import MACHINE_ROUTES
from control_plane.api.machines import Token, TokenRequest
from control_plane.api.maintenance_routes import MAINTENANCE_ROUTES
from control_plane.api.operations import JobEvents, JobMove, MoveRequest, TaskStory
from control_plane.api.people import OBJECT_KINDS, Needs
from control_plane.api.people_routes import PEOPLE_ROUTES
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.rebalancing_routes import REBALANCING_ROUTES
from control_plane.api.route_rows import operator_row, owner_row, viewer_row
from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.api.task_routes import TASK_ROUTES
from control_plane.api.validate import job_relations
from control_plane.api.watch import EndpointChanges, WatchedJobs
from control_plane.api.weights import EndpointWeights
from wire.fairness import MAX_BODY_BYTES
from wire.routes import Route

_JOB = "/v1/jobs/{job}"

ROUTES: tuple[Route, ...] = (
    *INTENT_ROUTES,  # first: a path is looked up in this order, and programs write sizes all day
    *JOIN_ROUTES,
    viewer_row("list_jobs", "/v1/jobs", Jobs, "All jobs"),
    owner_row(
        "apply_job",
        f"PUT {_JOB}",
        JobStatus,
        "Create a job or update it; new: only create it",
        request=JobSpec,
        query=("dry_run", "new"),
        relations=job_relations,
    ),
    Route(
        "plan_job",
        "POST",
        f"{_JOB}/plan",
        request=JobSpec,
        response=JobPlan,
        needs=Needs.VIEWER,
        changes=False,
        is_costly=True,
        relations=job_relations,
        summary="Effect of applying a job; changes nothing",
    ),
    viewer_row(
        "explain_job",
        f"{_JOB}/explanation",
        JobExplanation,
        "Tasks of a job that have a machine, and every reason why others wait",
        is_costly=True,
    ),
    viewer_row("get_job", _JOB, JobStatus, "One job"),
    *(
        owner_row(f"{verb}_job", f"POST {_JOB}/{verb}", JobStatus, summary, query=("expect",))
        for verb, summary in (
            (
                "pause",
                "Pause the update of a job: no further task is taken down for a newer version",
            ),
            ("resume", "Resume the update of a job"),
            ("restart", "Restart every task of a job, like an update"),
            ("rollback", "Roll the tasks back to the previous version of the job"),
        )
    ),
    owner_row(
        "move_job",
        f"POST {_JOB}/move",
        JobStatus,
        "Move a job to another entitlement by a rolling update",
        request=JobMove,
    ),
    owner_row("stop_job", f"DELETE {_JOB}", JobStatus, "Stop a job"),
    Route(
        "job_logs",
        "GET",
        f"{_JOB}/tasks/{{index}}/logs",
        query=("follow", "since", "tail", "previous"),
        stream_out=True,
        needs=Needs.OWNER,
        summary="Output of a task",
    ),
    viewer_row(
        "job_events",
        f"{_JOB}/events",
        JobEvents,
        "Operations on a job's tasks with their causes, oldest first, after event `after`",
        query=("after", "limit"),
    ),
    viewer_row(
        "task_story",
        f"{_JOB}/tasks/{{index}}/story",
        TaskStory,
        "Present and past operations on a task, with their causes",
    ),
    owner_row(
        "move_task",
        f"POST {_JOB}/tasks/{{index}}/move",
        TaskStory,
        "Move a task: it stops, and starts elsewhere, within the budget",
        request=MoveRequest,
    ),
    viewer_row(
        "get_endpoints",
        f"{_JOB}/endpoints",
        Endpoints,
        "Healthy tasks of a job; waits up to wait_s for a revision above `after`",
        query=("after", "wait_s"),
        roles=("host", "anyone"),
    ),
    Route(
        "watch_endpoints",
        "POST",
        "/v1/endpoints/watch",
        request=WatchedJobs,
        response=EndpointChanges,
        roles=("host", "anyone"),
        needs=Needs.VIEWER,
        changes=False,
        waits=True,
        summary="Healthy tasks of those of many jobs whose revision differs from the known one",
    ),
    owner_row(
        "put_weights",
        f"PUT {_JOB}/weights",
        Endpoints,
        "Set for a while which share of the requests tasks of a job get; not stored",
        request=EndpointWeights,
    ),
    owner_row(
        "put_shards",
        f"PUT {_JOB}/shards",
        ShardMapView,
        "Set which tasks serve which shards of a job; replaces the previous map",
        request=ShardMap,
        body_bytes=MAX_BODY_BYTES,
    ),
    viewer_row(
        "get_shards", f"{_JOB}/shards", ShardMapView, "Which tasks serve which shards of a job"
    ),
    viewer_row(
        "get_shard",
        f"{_JOB}/shards/{{shard}}",
        Endpoints,
        "Healthy tasks that serve a shard, in order; waits like the job's endpoints",
        query=("after", "wait_s"),
        roles=("host", "anyone"),
    ),
    *TASK_ROUTES,
    *MACHINE_ROUTES,
    *HEALTH_ROUTES,
    *MAINTENANCE_ROUTES,
    *LIMIT_ROUTES,
    *REBALANCING_ROUTES,
    *RESTORED_ROUTES,
    *CAPACITY_ROUTES,
    *PEOPLE_ROUTES,
    *PROFILE_ROUTES,
    viewer_row(
        "list_store_images",
        "/v1/images",
        Images,
        "All images of the image store",
        roles=("component",),
    ),
    Route(
        "push_image",
        "PUT",
        "/v1/images/{digest}",
        query=("format",),
        stream_in=True,
        response=ImageInfo,
        needs=Needs.ANY_OWNER,
        summary="Stream an image into the image store",
    ),
    Route(
        "sign_image",
        "POST",
        "/v1/images/{digest}/signatures",
        request=ImageSignature,
        response=ImageInfo,
        needs=Needs.ANY_OWNER,
        summary="Store a signature of an image; refused unless that key made it",
    ),
    Route(
        "name_image",
        "POST",
        "/v1/images/{digest}/names",
        request=NamedImage,
        response=ImageInfo,
        needs=Needs.ANY_OWNER,
        summary="Set the image that a name means from now on",
    ),
    operator_row(
        "remove_image", "DELETE /v1/images/{digest}", Ack, "Remove an image that no job runs"
    ),
    operator_row(
        "create_token",
        "POST /v1/tokens",
        Token,
        "A one-time join token for one host",
        request=TokenRequest,
    ),
    Route("healthz", "GET", "/healthz", response=Liveness, roles=("anyone",), summary="Alive"),
    Route(
        "readyz",
        "GET",
        "/readyz",
        response=Liveness,
        roles=("anyone",),
        summary="Readiness: the store is open and the schedulers run",
    ),
)


def object_error(name: str) -> str:
    """Return why no audit entry can have this object; empty if one can.

    Objects are a kind and a name, or the path of a route.
    """
    kind, slash, rest = name.partition("/")
    kinds = sorted(OBJECT_KINDS.values())
    paths = (route.path.removeprefix("/v1/") for route in ROUTES)
    if (slash and rest and kind in kinds) or name in paths:
        return ""
    return f"takes KIND/NAME such as job/web, not {name[:80]!r}; kinds: {', '.join(kinds)}"
