"""What service discovery lists: the tasks of a job that clients may call."""

from __future__ import annotations

import msgspec

from control_plane.api.weights import USUAL_WEIGHT


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of one healthy task of a job."""

    task: str
    machine: str
    host: str
    """An address: the task's own if its network is private, else its machine's; or a name."""
    ports: dict[str, int]
    version: int
    weight: int = USUAL_WEIGHT
    """Its share of the requests relative to the other endpoints; a load test or a canary may change
    it. 0: it gets no requests."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What discovery lists for a job, at a revision that rises with each change."""

    job: str
    revision: int
    endpoints: list[Endpoint]
