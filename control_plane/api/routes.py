"""The front end's route table."""

from __future__ import annotations

from agent.api import ImageInfo, Images, Liveness
from agent.routes import JOIN_ROUTES
from agent.wire.routes import Route
from control_plane.api.capacity_routes import CAPACITY_ROUTES
from control_plane.api.jobs import Endpoints, Jobs, JobSpec, JobStatus
from control_plane.api.machine_routes import MACHINE_ROUTES
from control_plane.api.machines import Token, TokenRequest
from control_plane.api.plans import JobExplanation, JobPlan
from control_plane.api.validate import job_relations

_USER = ("user", "local")
_JOB = "/v1/jobs/{job}"

ROUTES: tuple[Route, ...] = (
    *JOIN_ROUTES,
    Route("list_jobs", "GET", "/v1/jobs", response=Jobs, roles=_USER, summary="All jobs"),
    Route(
        "apply_job",
        "PUT",
        _JOB,
        request=JobSpec,
        response=JobStatus,
        query=("dry_run",),
        roles=_USER,
        relations=job_relations,
        summary="Create a job, or change what is wanted of it",
    ),
    Route(
        "plan_job",
        "POST",
        f"{_JOB}/plan",
        request=JobSpec,
        response=JobPlan,
        roles=_USER,
        relations=job_relations,
        summary="What applying a job would do; changes nothing",
    ),
    Route(
        "explain_job",
        "GET",
        f"{_JOB}/explanation",
        response=JobExplanation,
        roles=_USER,
        summary="How many tasks of a job have a machine, and every reason why others wait",
    ),
    Route("get_job", "GET", _JOB, response=JobStatus, roles=_USER, summary="One job"),
    Route("stop_job", "DELETE", _JOB, response=JobStatus, roles=_USER, summary="Stop a job"),
    Route(
        "job_logs",
        "GET",
        f"{_JOB}/tasks/{{index}}/logs",
        query=("follow", "since", "tail"),
        stream_out=True,
        roles=_USER,
        summary="What a task wrote",
    ),
    Route(
        "get_endpoints",
        "GET",
        f"{_JOB}/endpoints",
        query=("after", "wait_s"),
        response=Endpoints,
        roles=("user", "local", "host", "anyone"),
        summary="Healthy tasks of a job; waits up to wait_s for a revision above `after`",
    ),
    *MACHINE_ROUTES,
    *CAPACITY_ROUTES,
    Route(
        "list_store_images",
        "GET",
        "/v1/images",
        response=Images,
        roles=_USER,
        summary="All images of the image store",
    ),
    Route(
        "push_image",
        "PUT",
        "/v1/images/{digest}",
        query=("format",),
        stream_in=True,
        response=ImageInfo,
        roles=_USER,
        summary="Stream an image into the image store",
    ),
    Route(
        "create_token",
        "POST",
        "/v1/tokens",
        request=TokenRequest,
        response=Token,
        roles=_USER,
        summary="A one-time join token for one host",
    ),
    Route("healthz", "GET", "/healthz", response=Liveness, roles=("anyone",), summary="Alive"),
    Route(
        "readyz",
        "GET",
        "/readyz",
        response=Liveness,
        roles=("anyone",),
        summary="Ready: the store is open and the schedulers run",
    ),
)
