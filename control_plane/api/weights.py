"""Weights of endpoints: the share of requests that a task gets in a load test or as a canary."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

USUAL_WEIGHT = 100
"""The default weight of a task."""
WEIGHT_MAX = 256
"""The largest weight of HAProxy (its configuration manual, section 5.2)."""
LONGEST_S = 900.0


class EndpointWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Temporary weights of a job's tasks; they are not stored.

    After `for_s`, and when another control plane takes over, all tasks have the usual weight again:
    a load test that crashes leaves nothing behind.
    """

    weights: Annotated[
        dict[Annotated[int, Meta(ge=0, lt=15_000)], Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]],
        Meta(max_length=15_000),
    ] = {}
    """Index of a task → its weight; other tasks have 100. Empty: all tasks have 100."""
    for_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] = 60.0
