"""The agent's route table, and the few calls that an agent makes to the control plane."""

from __future__ import annotations

from agent.api import (
    Ack,
    Authority,
    Certificate,
    Events,
    ImageInfo,
    ImagePull,
    Images,
    JoinRequest,
    Liveness,
    MachineFacts,
    ProfileSpec,
    ProfileStatus,
    RenewRequest,
    Tasks,
    TaskSpec,
    TaskStatus,
)
from agent.usage import Usages
from agent.wire.routes import Route

_TASK = "/v1/tasks/{task_id}"

ROUTES: tuple[Route, ...] = (
    Route("get_machine", "GET", "/v1/machine", response=MachineFacts, summary="Facts"),
    Route("list_images", "GET", "/v1/images", response=Images, summary="All images"),
    Route(
        "pull_image",
        "POST",
        "/v1/images:pull",
        request=ImagePull,
        response=ImageInfo,
        summary="Fetch an image from the control plane, verify and publish it",
    ),
    Route(
        "put_image",
        "PUT",
        "/v1/images/{digest}",
        query=("format",),
        stream_in=True,
        response=ImageInfo,
        summary="Stream an image in; verified before it is published",
    ),
    Route("get_image", "GET", "/v1/images/{digest}", response=ImageInfo, summary="One image"),
    Route("delete_image", "DELETE", "/v1/images/{digest}", response=Ack, summary="Remove it"),
    Route("list_tasks", "GET", "/v1/tasks", response=Tasks, summary="All tasks"),
    Route(
        "put_task",
        "PUT",
        _TASK,
        query=("heard",),
        request=TaskSpec,
        response=TaskStatus,
        summary="Desired state of a task; idempotent by generation",
    ),
    Route("get_task", "GET", _TASK, response=TaskStatus, summary="Observed state of a task"),
    Route(
        "delete_task",
        "DELETE",
        _TASK,
        query=("generation", "epoch"),
        response=TaskStatus,
        summary="Stop the task and tear it down",
    ),
    Route(
        "restart_task",
        "POST",
        f"{_TASK}:restart",
        query=("generation", "epoch", "heard"),
        response=TaskStatus,
        summary="Stop the task and start it again, now",
    ),
    Route("get_usage", "GET", "/v1/usage", response=Usages, summary="What each task uses"),
    Route(
        "task_logs",
        "GET",
        f"{_TASK}/logs",
        query=("follow", "since", "tail"),
        stream_out=True,
        summary="What the task wrote, from the journal",
    ),
    Route(
        "put_profile",
        "PUT",
        "/v1/profile",
        request=ProfileSpec,
        response=ProfileStatus,
        summary="Bring the host to a profile",
    ),
    Route("get_profile", "GET", "/v1/profile", response=ProfileStatus, summary="Its state"),
    Route(
        "get_events",
        "GET",
        "/v1/events",
        query=("after", "wait_s", "heard", "epoch"),
        response=Events,
        summary="What happened since; waits up to wait_s for something to happen",
    ),
    Route("healthz", "GET", "/healthz", response=Liveness, summary="Alive"),
    Route("readyz", "GET", "/readyz", response=Liveness, summary="Ready: state is reconciled"),
)

JOIN_ROUTES: tuple[Route, ...] = (
    Route(
        "get_authority",
        "GET",
        "/v1/authority",
        response=Authority,
        roles=("anyone",),
        summary="The authority's certificate; compare its SHA-256 with your pin",
    ),
    Route(
        "join",
        "POST",
        "/v1/join",
        request=JoinRequest,
        response=Certificate,
        roles=("anyone",),
        summary="Join with a one-time token",
    ),
    Route(
        "renew",
        "POST",
        "/v1/renew",
        request=RenewRequest,
        response=Certificate,
        roles=("host",),
        changes=False,
        summary="The next certificate of a joined host",
    ),
    Route(
        "fetch_image",
        "GET",
        "/v1/images/{digest}/stream",
        stream_out=True,
        roles=("host",),
        needs="viewer",
        summary="The stream of an image",
    ),
)
