"""The steps of a load test: their weights, limits and result. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from control_plane.api.load_tests import LoadTestRequest, LoadTestStep
from control_plane.api.weights import WEIGHT_MAX

GROWTH = 1.4
"""Growth of the load from one step to the next, which is the precision of the result."""
PLACEHOLDER = "$task"


def multiples(request: LoadTestRequest) -> list[float]:
    """Return the steps: multiples of the task's usual requests, beginning with 1."""
    count = math.floor(math.log(request.most) / math.log(GROWTH) + 1e-9)
    found = [GROWTH**number for number in range(count + 1)]
    return found if found[-1] >= request.most * (1 - 1e-9) else [*found, request.most]


def weights_for(multiple: float, task: int, others: Collection[int]) -> dict[int, int]:
    """Return weights that give a task this multiple of the requests of each other task.

    Weights are whole numbers up to 256, so the others get small ones for a large multiple.
    """
    each = max(1, min(100, round(WEIGHT_MAX / multiple)))
    return dict.fromkeys(others, each) | {task: min(WEIGHT_MAX, max(1, round(each * multiple)))}


def exceeded_limit(request: LoadTestRequest, step: LoadTestStep) -> str:
    """Return the limit that a step exceeds, as text; empty: none."""
    if not all(map(math.isfinite, (step.load, step.latency_s, step.errors))):
        return "a measurement is not a number"
    if step.latency_s > request.latency_max_s:
        return f"latency of {step.latency_s:.3g} s is over {request.latency_max_s:g} s"
    if step.errors > request.errors_max:
        return f"{step.errors:.2%} errors are over {request.errors_max:.2%}"
    return ""


def capacity(steps: Sequence[LoadTestStep]) -> float | None:
    """Return the largest load within the limits."""
    return max((step.load for step in steps), default=None)


def query_for(query: str, task: str) -> str:
    """Return a query about a task; its name is a DNS label, which needs no quoting in PromQL."""
    return query.replace(PLACEHOLDER, task)
