"""Load tests: how much load one task of a job carries, found with the job's own requests."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Ack
from wire.routes import Route

Query = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadTestRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of an owner. In queries `$task` is the name of the task, such as `web-0`."""

    load: Query
    """PromQL: the load of the task, such as its requests in a second."""
    latency: Query
    """PromQL: latency of its answers, in seconds."""
    latency_max_s: Annotated[float, Meta(gt=0, le=3600)]
    """Latency in seconds above which the test ends."""
    errors: str = ""
    """PromQL: the share of its answers that are errors; empty: not checked."""
    errors_max: Annotated[float, Meta(ge=0, le=1)] = 0.01
    task: Annotated[int, Meta(ge=0)] = 0
    most: Annotated[float, Meta(gt=1, le=50)] = 8.0
    """Most requests that are sent to the task, as a multiple of its usual share."""
    step_s: Annotated[float, Meta(ge=5, le=300)] = 60.0
    """Seconds of each step; latency is read five times per step."""


class LoadTestState(StrEnum):
    """The state of a load test."""

    RUNNING = "running"
    DONE = "done"
    """A limit or the maximum of requests was reached; `reason` says which."""
    FAILED = "failed"
    """It has no result for the task, because another part failed."""


class LoadTestStep(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements at one multiple of the usual requests."""

    multiple: float
    load: float
    latency_s: float
    errors: float = 0.0


class LoadTest(msgspec.Struct, frozen=True, kw_only=True):
    """A load test of one job; the last one is kept until the autoscaler ends."""

    job: str
    task: str
    began_at: float
    state: LoadTestState = LoadTestState.RUNNING
    steps: list[LoadTestStep] = []
    """The steps within the limits."""
    capacity: float | None = None
    """The largest load of a step within the limits; None: no step was."""
    reason: str = ""


_ONE = "/v1/load-tests/{job}"
LOAD_TEST_ROUTES: tuple[Route, ...] = (
    Route(
        "begin_load_test",
        "POST",
        _ONE,
        request=LoadTestRequest,
        response=LoadTest,
        summary="Send one task of a job a growing share of the job's requests, up to a limit",
    ),
    Route("get_load_test", "GET", _ONE, response=LoadTest, summary="The last load test of a job"),
    Route(
        "end_load_test",
        "DELETE",
        _ONE,
        response=Ack,
        summary="End a load test; all tasks get their usual share again",
    ),
)
"""Served by `twine-autoscaler` on its unix socket."""
