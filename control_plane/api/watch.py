"""Following where many jobs answer, in one call."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count
from control_plane.api.jobs import Endpoints
from control_plane.api.policy import JobName

MAX_JOBS_WATCHED = 1000
"""In one call; who follows more makes several."""


class WatchedJobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs a caller follows, and what it knows of them."""

    known: Annotated[dict[JobName, Count | None], Meta(min_length=1, max_length=MAX_JOBS_WATCHED)]
    """Job → the revision that is known; 0: known that there is no such job; null: nothing."""
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 0.0


class EndpointsNews(msgspec.Struct, frozen=True, kw_only=True):
    """What is not as the caller knew it; both empty when nothing changed in time."""

    changed: list[Endpoints] = []
    missing: list[str] = []
    """Jobs that there are not."""
