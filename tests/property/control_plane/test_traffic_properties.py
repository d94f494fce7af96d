"""Weights of endpoints that give a canary its share of the requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.api.weights import USUAL_WEIGHT, WEIGHT_MAX
from control_plane.job_control.core.traffic import ROUNDING, part_of_requests, weights_of

pytestmark = pytest.mark.behaviour("JC10")

PARTS = st.one_of(
    st.sampled_from((0.0, 1.0, 0.5, 0.01, 0.05, 0.1, 0.99, 1e-9)),
    st.floats(0, 1),
)
COUNTS = st.integers(1, 15_000)


def reach(canaries: int, others: int) -> tuple[float, float]:
    """Return the smallest and the largest share that weights above 0 can give."""
    least = part_of_requests((1, WEIGHT_MAX), canaries, others)
    return least, part_of_requests((WEIGHT_MAX, 1), canaries, others)


@given(PARTS, COUNTS, COUNTS)
@example(0.05, 2, 8)
@example(0.01, 1, 1)
@example(0.1, 2, 10_000)
def test_the_share_of_requests_is_the_wanted_share_within_rounding(
    traffic: float, canaries: int, others: int
) -> None:
    weights = weights_of(traffic, canaries, others)
    part, (least, most) = part_of_requests(weights, canaries, others), reach(canaries, others)
    if traffic in (0, 1):
        assert part == traffic
    else:
        assert abs(part - min(max(traffic, least), most)) <= ROUNDING


@given(PARTS, COUNTS, COUNTS)
def test_no_endpoint_is_left_without_requests_but_for_a_part_of_none_or_all(
    traffic: float, canaries: int, others: int
) -> None:
    weights = weights_of(traffic, canaries, others)
    assert all(isinstance(weight, int) and weight <= WEIGHT_MAX for weight in weights)
    assert (min(weights) == 0) is (traffic in (0, 1))
    assert max(weights) > 0


@given(st.lists(PARTS, min_size=2, max_size=6), COUNTS, COUNTS)
def test_a_larger_part_never_gets_fewer_requests(
    parts: list[float], canaries: int, others: int
) -> None:
    got = [
        part_of_requests(weights_of(part, canaries, others), canaries, others)
        for part in sorted(parts)
    ]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(got))


@given(PARTS, COUNTS)
def test_without_endpoints_of_both_kinds_all_are_alike(traffic: float, count: int) -> None:
    """A canary without requests does not stop a job whose other tasks are all down."""
    assert weights_of(traffic, count, 0) == weights_of(traffic, 0, count)
    assert set(weights_of(traffic, count, 0)) == {USUAL_WEIGHT}
