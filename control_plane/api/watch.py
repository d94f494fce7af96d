"""Following the endpoints of many jobs in one call."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count
from control_plane.api.endpoints import Endpoints
from control_plane.api.policy import JobName

MAX_JOBS_WATCHED = 1000
"""In one call; a client that follows more jobs makes several calls."""


class WatchedJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The jobs that a caller follows, and the revisions that it has."""

    known: Annotated[dict[JobName, Count | None], Meta(min_length=1, max_length=MAX_JOBS_WATCHED)]
    """Job → the revision that the caller has; 0: there is no such job; null: none."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class EndpointChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What differs from the caller's revisions; both empty when nothing changed in time."""

    changed: list[Endpoints] = []
    missing: list[str] = []
    """Jobs that do not exist."""
