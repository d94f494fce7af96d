"""The front end's route table."""

from __future__ import annotations

from agent.api import Ack, ImageInfo, Images, ImageSignature, Liveness, NamedImage
from agent.routes import JOIN_ROUTES
from control_plane.api.capacity_routes import CAPACITY_ROUTES, PROFILE_ROUTES
from control_plane.api.health_routes import HEALTH_ROUTES, LIMIT_ROUTES, RESTORED_ROUTES
from control_plane.api.intent_routes import INTENT_ROUTES
from control_plane.api.jobs import Endpoints, Jobs, JobSpec, JobStatus
from control_plane.api.machine_routes import MACHINE_ROUTES
from control_plane.api.machines import Token, TokenRequest
from control_plane.api.maintenance_routes import MAINTENANCE_ROUTES
from control_plane.api.operations import JobEvents, JobMove, MoveRequest, TaskStory
from control_plane.api.people import OBJECT_KINDS, Needs
from control_plane.api.people_routes import PEOPLE_ROUTES
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.rebalancing_routes import REBALANCING_ROUTES
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
    Route("list_jobs", "GET", "/v1/jobs", response=Jobs, needs=Needs.VIEWER, summary="All jobs"),
    Route(
        "apply_job",
        "PUT",
        _JOB,
        request=JobSpec,
        response=JobStatus,
        query=("dry_run", "new"),
        needs=Needs.OWNER,
        relations=job_relations,
        summary="Create a job or update it; new: only create it",
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
    Route(
        "explain_job",
        "GET",
        f"{_JOB}/explanation",
        response=JobExplanation,
        is_costly=True,
        needs=Needs.VIEWER,
        summary="Tasks of a job that have a machine, and every reason why others wait",
    ),
    Route("get_job", "GET", _JOB, response=JobStatus, needs=Needs.VIEWER, summary="One job"),
    *(
        Route(
            f"{verb}_job",
            "POST",
            f"{_JOB}/{verb}",
            response=JobStatus,
            needs=Needs.OWNER,
            summary=summary,
        )
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
    Route(
        "move_job",
        "POST",
        f"{_JOB}/move",
        request=JobMove,
        response=JobStatus,
        needs=Needs.OWNER,
        summary="Move a job to another entitlement by a rolling update",
    ),
    Route("stop_job", "DELETE", _JOB, response=JobStatus, needs=Needs.OWNER, summary="Stop a job"),
    Route(
        "job_logs",
        "GET",
        f"{_JOB}/tasks/{{index}}/logs",
        query=("follow", "since", "tail", "previous"),
        stream_out=True,
        needs=Needs.OWNER,
        summary="Output of a task",
    ),
    Route(
        "job_events",
        "GET",
        f"{_JOB}/events",
        query=("after", "limit"),
        response=JobEvents,
        needs=Needs.VIEWER,
        summary=(
            "Operations on a job's tasks with their causes, oldest first, after event `after`"
        ),
    ),
    Route(
        "task_story",
        "GET",
        f"{_JOB}/tasks/{{index}}/story",
        response=TaskStory,
        needs=Needs.VIEWER,
        summary="Present and past operations on a task, with their causes",
    ),
    Route(
        "move_task",
        "POST",
        f"{_JOB}/tasks/{{index}}/move",
        request=MoveRequest,
        response=TaskStory,
        needs=Needs.OWNER,
        summary="Move a task: it stops, and starts elsewhere, within the budget",
    ),
    Route(
        "get_endpoints",
        "GET",
        f"{_JOB}/endpoints",
        query=("after", "wait_s"),
        response=Endpoints,
        roles=("host", "anyone"),
        needs=Needs.VIEWER,
        summary="Healthy tasks of a job; waits up to wait_s for a revision above `after`",
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
    Route(
        "put_weights",
        "PUT",
        f"{_JOB}/weights",
        request=EndpointWeights,
        response=Endpoints,
        needs=Needs.OWNER,
        summary="Set for a while which share of the requests tasks of a job get; not stored",
    ),
    Route(
        "put_shards",
        "PUT",
        f"{_JOB}/shards",
        request=ShardMap,
        response=ShardMapView,
        body_bytes=MAX_BODY_BYTES,
        needs=Needs.OWNER,
        summary="Set which tasks serve which shards of a job; replaces the previous map",
    ),
    Route(
        "get_shards",
        "GET",
        f"{_JOB}/shards",
        response=ShardMapView,
        needs=Needs.VIEWER,
        summary="Which tasks serve which shards of a job",
    ),
    Route(
        "get_shard",
        "GET",
        f"{_JOB}/shards/{{shard}}",
        query=("after", "wait_s"),
        response=Endpoints,
        roles=("host", "anyone"),
        needs=Needs.VIEWER,
        summary="Healthy tasks that serve a shard, in order; waits like the job's endpoints",
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
    Route(
        "list_store_images",
        "GET",
        "/v1/images",
        response=Images,
        roles=("component",),
        needs=Needs.VIEWER,
        summary="All images of the image store",
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
    Route(
        "remove_image",
        "DELETE",
        "/v1/images/{digest}",
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Remove an image that no job runs",
    ),
    Route(
        "create_token",
        "POST",
        "/v1/tokens",
        request=TokenRequest,
        response=Token,
        needs=Needs.OPERATOR,
        summary="A one-time join token for one host",
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
