"""Computes the weights of endpoints that give canary tasks their part of the requests.

A canary may specify the part of the requests that its tasks get together, whatever their number
(JC10). All its endpoints have one weight, and all others another, so that tasks of one version can
be compared with each other.
"""

from __future__ import annotations

from functools import lru_cache
from math import floor

from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobRecord
from control_plane.api.weights import USUAL_WEIGHT, WEIGHT_MAX

USUAL = (USUAL_WEIGHT, USUAL_WEIGHT)
ROUNDING = 0.001
"""Largest error of the part, as a share of all requests, within the range of the weights. Ratios of
weights from 1 to 256 are at most 1 / 128.5 apart (1 : 128 and 1 : 129). An error of half this
distance changes the part by at most a quarter of it."""


@lru_cache(maxsize=4096)
def weights_of(traffic: float, canaries: int, others: int) -> tuple[int, int]:
    """Return the weight of each canary endpoint and of each other one, whole numbers up to 256.

    `traffic` is the canaries' part of all requests, 0 to 1. A weight is 0 only if that part is 0 or
    1. Without endpoints of both kinds all have the usual weight. Of equally close pairs the
    smallest is taken: with small weights proxies alternate between endpoints most often.
    """
    if not canaries or not others:
        return USUAL
    if traffic <= 0:
        return 0, USUAL_WEIGHT
    if traffic >= 1:
        return USUAL_WEIGHT, 0
    ratio = traffic * others / ((1 - traffic) * canaries)
    ratio = min(float(WEIGHT_MAX), max(1 / WEIGHT_MAX, ratio))
    pairs = list[tuple[int, int]]()
    for larger in range(1, WEIGHT_MAX + 1):
        below = floor(larger * min(ratio, 1 / ratio))
        nearest = (max(1, below), larger), (min(below + 1, WEIGHT_MAX), larger)
        pairs += nearest if ratio < 1 else (pair[::-1] for pair in nearest)

    def distance(pair: tuple[int, int]) -> tuple[float, int]:
        return abs(part_of_requests(pair, canaries, others) - traffic), sum(pair)

    return min(pairs, key=distance)


def part_of_requests(weights: tuple[int, int], canaries: int, others: int) -> float:
    """Return the part of the requests that a proxy which forwards by weight sends to canaries."""
    to_canaries, to_others = weights[0] * canaries, weights[1] * others
    total = to_canaries + to_others
    return to_canaries / total if total else 0.0


def traffic_of(record: JobRecord) -> float | None:
    """Return the part of the requests that all canary tasks get together; None: no special part.

    It is in force until the last of these tasks runs another version. So the requests of an ended
    canary do not rise before its tasks are replaced.
    """
    intent = record.intents.get(Dimension.CANARY)
    if intent is None or not record.trials:
        return None
    if intent.value is None:
        return intent.traffic
    traffic: float | None = intent.value.get("traffic")
    return traffic


def weights_by_version(record: JobRecord) -> dict[int, int]:
    """Return the weight of each version's endpoints; empty: no canary has a part of its own."""
    traffic = traffic_of(record)
    if traffic is None:
        return {}
    versions = [task.version for task in record.tasks if task.listed]
    canaries = sum(version in record.trials for version in versions)
    weights = weights_of(traffic, canaries, len(versions) - canaries)
    return {version: weights[version not in record.trials] for version in set(versions)}


def describe_traffic(record: JobRecord) -> tuple[str, str]:
    """Describe the part of the requests for canary endpoints, and why it is not the wanted part."""
    traffic = traffic_of(record)
    if traffic is None:
        return "", ""
    listed = [task.version in record.trials for task in record.tasks if task.listed]
    canaries, others = sum(listed), len(listed) - sum(listed)
    if not canaries or not others:
        which = "canary" if not canaries else "other"
        return "", f"{traffic:.2%} of the requests: no {which} task is listed"
    part = part_of_requests(weights_of(traffic, canaries, others), canaries, others)
    words = f", with {part:.2%} of the requests"
    if abs(part - traffic) <= ROUNDING:
        return words, ""
    return words, f"{traffic:.2%} of the requests: weights must be from 1 to {WEIGHT_MAX}"
