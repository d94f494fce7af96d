"""Best-effort work: what users submit to the opportunistic scheduler, and its state."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Ack
from control_plane.api.jobs import JobName, JobSpec
from control_plane.api.people import Needs
from control_plane.api.route_rows import viewer_row
from wire.routes import Route


class QueuedState(StrEnum):
    """How far a piece of work is."""

    WAITING = "waiting"
    RUNNING = "running"
    """Its job is in the region; some of its tasks may wait for machines."""
    DONE = "done"
    FAILED = "failed"
    """It failed as often as allowed; `reason` has the last failure."""


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of work as its user submits it."""

    job: JobSpec
    """The job to run, whose tasks end. Its entitlement is the scheduler's and its restart policy
    `never`; `life.pre_stop` is the hook in which tasks save their progress (a checkpoint)."""
    priority: Annotated[int, Meta(ge=0, le=1000)] = 500
    """Higher first; running work of lower priority makes room."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often it may fail. A machine that is called back does not count."""


class QueuedWork(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work as it is stored and shown."""

    schema: int = 1
    name: JobName
    user: str
    request: WorkRequest = msgspec.field(name="wish")  # the name of stored records
    submitted_at: float
    state: QueuedState = QueuedState.WAITING
    failures: int = 0
    retry_at: float = 0.0
    """When it may start again after a failure, in seconds since 1970."""
    moves: int = 0
    """Number of tasks that moved because their machine was called back or failed."""
    machine_s: float = 0.0
    """Task-seconds that it ran, for charging its user."""
    ended_at: float | None = None
    doubt_until: float = 0.0
    """Until when a start whose answer was lost may still come through, in seconds since 1970."""
    is_cancelled: bool = False
    """Whether it is only kept for such a start; it is not shown, and its state is `failed`."""
    reason: str = ""


class WorkQueue(msgspec.Struct, frozen=True, kw_only=True):
    """All work, in the order in which it is chosen."""

    entitlement: str
    capacity: str
    """What the region reports: full, short or absent; empty: the last round got no report."""
    failing: str = ""
    """Why the front end cannot be used at present; running work continues."""
    work: list[QueuedWork] = []
    damaged: list[str] = []
    """Work whose stored record cannot be read; its job runs on until root cancels the work."""


_ONE = "/v1/work/{work}"
OPTIMUS_ROUTES: tuple[Route, ...] = (
    viewer_row("list_work", "/v1/work", WorkQueue, "All best-effort work"),
    Route(
        "submit_work",
        "PUT",
        _ONE,
        request=WorkRequest,
        response=QueuedWork,
        needs=Needs.VIEWER,
        summary="Submit a piece of work; a repetition changes nothing",
    ),
    Route(
        "cancel_work",
        "DELETE",
        _ONE,
        response=Ack,
        needs=Needs.VIEWER,
        summary="Stop a piece of work and remove it",
    ),
)
