"""Weights of endpoints: which share of requests tasks get in a load test or as a canary."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

USUAL_WEIGHT = 100
"""The weight of a task without another one."""
WEIGHT_MAX = 256
"""The largest weight of HAProxy (its configuration manual, section 5.2)."""
LONGEST_S = 900.0


class EndpointWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which share of the requests tasks of a job get for a while; they are not stored.

    After `for_s`, and when another control plane takes over, all tasks have the usual weight again:
    a load test that crashes leaves nothing behind.
    """

    weights: Annotated[
        dict[Annotated[int, Meta(ge=0, lt=15_000)], Annotated[int, Meta(ge=1, le=WEIGHT_MAX)]],
        Meta(max_length=15_000),
    ] = {}
    """Index of a task → its weight; others have 100. Empty: all have, from now on."""
    for_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] = 60.0
