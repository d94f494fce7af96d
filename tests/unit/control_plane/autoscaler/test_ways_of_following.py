"""Of several ways to follow a load, each job uses the one with the lowest cost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from control_plane.api.autoscale import SpeedLimit
from control_plane.autoscaler.core.recommendation import JobSizing
from control_plane.autoscaler.core.ways import (
    LEARNT_S,
    PENALTY,
    WAYS,
    WaysState,
    penalty,
    with_measurement,
)
from tests.unit.control_plane.autoscaler.sizing_builders import NOON, a_policy, seen

pytestmark = pytest.mark.behaviour("AS1")

POLICY = a_policy(
    target=1.0,
    maximum=1000,
    up=SpeedLimit(share=100, per_s=60),
    down=SpeedLimit(share=1, per_s=60),
)
MINUTE, DAY = 60.0, 1440


def followed(load: Callable[[int], float], minutes: int, start: int = 5) -> tuple[JobSizing, str]:
    """Return the sizing of a job that follows a load per minute, and the last reason.

    Tasks are healthy after `start` minutes.
    """
    sizing, sizes, reason = JobSizing(), [50], ""
    for minute in range(minutes):
        observed = seen(
            load(minute),
            sizes[-1],
            at=NOON + minute * MINUTE,
            healthy=min(sizes[-start - 1 :]),
            capacity=1.0,
        )
        found = sizing.advance(POLICY, observed)
        sizes.append(found.tasks)
        reason = found.reason
    return sizing, reason


def bursts(minute: int) -> float:
    """Return a load of 20 tasks, with bursts of up to 60 for ten minutes at unpredictable times."""
    hour, chance = minute // 30, random.Random(minute // 30)
    begins = chance.randrange(20)
    inside = chance.random() < 0.3 and begins <= minute - 30 * hour < begins + 10
    return 20.0 * (1 + 2 * inside) * (1 + 0.05 * random.Random(minute).gauss(0, 1))


def returning(minute: int) -> float:
    """Return a load that peaks for five minutes in each quarter of an hour, at no regular
    minute."""
    return 60.0 if (minute + minute // 15 * 7) % 15 < 5 else 20.0


def day(minute: int) -> float:
    return 60 - 30 * math.cos(2 * math.pi * minute / DAY)


def test_each_load_is_followed_in_the_way_that_costs_least() -> None:
    names = {}
    for load in (bursts, returning, day):
        sizing, reason = followed(load, 2 * DAY)
        ways = sizing.state.ways
        names[load] = WAYS[ways.cheapest].name
        assert ways.costs[ways.cheapest] == min(ways.costs)
        assert ways.load_of(ways.cheapest) >= load(2 * DAY - 1) - 1e-9
        assert (f"by {names[load]}: it cost" in reason) == (ways.cheapest > 0)
    assert "kept for" in names[returning]
    assert names[day] == WAYS[0].name
    assert names[bursts] != names[day]


def test_the_forecast_is_followed_until_a_day_is_known() -> None:
    sizing, _ = followed(returning, DAY - 1)
    ways = sizing.state.ways
    assert ways.learnt_s < LEARNT_S
    assert ways.cheapest == 0
    assert ways.explained() == ""


def test_a_missing_task_costs_more_where_the_policy_asks_for_more() -> None:
    assert penalty(0.8) == pytest.approx(PENALTY)
    assert penalty(0.5) < penalty(0.8) < penalty(0.95) < penalty(0.999)


def test_the_cost_counts_missing_and_idle_tasks() -> None:
    """Ten tasks; the load doubles for two minutes and new tasks need five. So 2 x 10 tasks are
    missing."""
    state = WaysState()
    for minute, load in enumerate([10.0, 10.0, 20.0, 20.0, 10.0]):
        measured = NOON + minute * MINUTE, load, load
        state = with_measurement(state, 0.8, measured, 1.0, 300.0)
    by = dict(zip((way.name for way in WAYS), state.costs, strict=True))
    assert by["the forecast"] == pytest.approx(2 * 10 * PENALTY, rel=0.01)
    kept = 2 * 10 * PENALTY + 10
    assert by["the load, kept for 30 min"] == pytest.approx(kept, rel=0.01)
    idle = 4 + 4 + 7 + 7 + 4 - 4  # the first evaluation has no earlier time
    assert by["the load times 1.35"] == pytest.approx((6 + 6) * PENALTY + idle, rel=0.01)


@pytest.mark.parametrize("step_s", [-1e6, -90.0, 0.0, 90.0, 1e6])
def test_a_step_of_a_clock_adds_five_minutes_at_most(step_s: float) -> None:
    state = with_measurement(WaysState(), 0.8, (NOON, 10.0, 10.0), 1.0, 300.0)
    after = with_measurement(state, 0.8, (NOON + step_s, 5.0, 5.0), 1.0, 300.0)
    assert after.learnt_s <= 300.0
    assert max(after.costs) <= 5 * 10 * PENALTY
    assert after.load_of(0) == 5.0


def test_the_history_of_a_job_is_bounded() -> None:
    """The largest state: loads that fall each minute, and tasks that take hours to start."""
    state = WaysState()
    for minute in range(300):
        load = 1000.0 - minute
        state = with_measurement(state, 0.8, (NOON + minute * MINUTE, load, load), 1.0, 9999.0)
    assert len(state.loads) <= 31
    assert all(len(sizes) <= 32 for sizes in state.sizes)
