"""For any observation: sizes stay in bounds, obey speed limits, and fall only for a reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.api.autoscale import Autoscale, Headroom, LoadSignal, SpeedLimit
from control_plane.api.sizings import Forecast
from control_plane.autoscaler.core.history import LoadHistory, code_of, value_of
from control_plane.autoscaler.core.observing import JobObservation
from control_plane.autoscaler.core.recommendation import (
    JobSizing,
    SizingState,
    recommend,
)
from control_plane.autoscaler.core.sizing import tasks_for, tasks_for_survivors

pytestmark = pytest.mark.behaviour("AS1")

START = 20_000 * 86_400.0
LOADS = st.floats(0, 1e9) | st.sampled_from([math.nan, math.inf, -1.0, 0.0]) | st.none()
SPEEDS = st.builds(SpeedLimit, share=st.floats(0.01, 3), per_s=st.sampled_from([60.0, 600.0]))


@st.composite
def policies(draw: st.DrawFn) -> Autoscale:
    low = draw(st.integers(1, 50))
    return Autoscale(
        minimum=low,
        maximum=draw(st.integers(low, 500)),
        target=draw(st.floats(0.01, 1)),
        signal=LoadSignal.CPU,
        headroom=draw(st.sampled_from(Headroom)),
        up=draw(SPEEDS),
        down=draw(SPEEDS),
    )


@st.composite
def observations(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "after": draw(st.sampled_from([1.0, 60.0, 61.0, 300.0, 4000.0])),
        "load": draw(LOADS),
        "age": draw(st.sampled_from([0.0, 10.0, 1000.0])),
        "push_reason": draw(st.sampled_from(["", "", "an update is running"])),
        "sick": draw(st.sampled_from([0, 0, 1])),
        "followed": draw(st.booleans()),
    }


@given(policies(), st.lists(observations(), max_size=30), st.integers(0, 6))
def test_sizes_stay_within_bounds_and_speed_limits(
    policy: Autoscale, course: list[dict[str, Any]], msbs: int
) -> None:
    sizing, at, tasks = JobSizing(), START, policy.minimum
    sizes: list[tuple[float, int]] = [(at, tasks)]
    for step in course:
        at += step["after"]
        found = sizing.advance(
            policy,
            JobObservation(
                at=at,
                tasks=tasks,
                healthy=max(0, tasks - step["sick"]),
                capacity=2.0,
                load=step["load"],
                measured_at=at - step["age"],
                push_reason=step["push_reason"],
                msbs=msbs,
            ),
        )
        assert policy.minimum <= found.tasks <= policy.maximum
        assert found.reason
        if step["push_reason"] or step["age"] > 500 or step["load"] is None:
            assert found.tasks >= tasks
        if step["sick"]:  # only tasks that never served are removed
            assert found.tasks >= tasks - step["sick"]
        for limit, is_up in ((policy.up, True), (policy.down, False)):
            last = [size for when, size in sizes if when <= at - limit.per_s][-1:]
            window = last + [size for when, size in sizes if when > at - limit.per_s]
            if is_up and found.tasks > tasks:
                base = min(window)
                assert found.tasks <= max(base + 1, base * (1 + limit.share) + 1e-3)
            if not is_up and found.tasks < tasks:
                base = max(window)
                assert found.tasks >= min(base - 1, base * (1 - limit.share) - 1e-3)
        if step["followed"] and found.tasks != tasks:
            tasks = found.tasks
            sizes.append((at, tasks))


@pytest.mark.behaviour("AS1")
@given(policies(), LOADS, st.floats() | st.just(math.nan), st.integers(1, 500))
def test_an_absurd_forecast_never_leaves_the_bounds(
    policy: Autoscale, load: float | None, mad: float, tasks: int
) -> None:
    """Holds for any value of the forecast, NaN and infinity included."""
    seen = JobObservation(at=START, tasks=tasks, healthy=tasks, capacity=2.0, measured_at=START)
    found = recommend(policy, seen, load, Forecast(load=mad, expected=mad), SizingState())
    top = max(policy.maximum, tasks if found.held else 0)
    assert policy.minimum <= found.tasks <= top


@pytest.mark.behaviour("AS1")
@given(st.integers(0, 5000), st.integers(2, 40))
def test_the_survivors_of_any_msb_are_enough_and_one_task_fewer_is_not(
    survivors: int, msbs: int
) -> None:
    """The size is the smallest that survives the loss of one MSB."""
    tasks = tasks_for_survivors(survivors, msbs)

    def left(size: int) -> int:
        return size - math.ceil(size / msbs)

    assert left(tasks) >= survivors
    assert tasks == 0 or left(tasks - 1) < survivors


@given(st.floats(0, 1e12), st.floats(1e-6, 1e9))
def test_a_size_carries_its_load(load: float, per_task: float) -> None:
    tasks = tasks_for(load, per_task)
    assert tasks * per_task >= load - 2e-6 * per_task or tasks == 1_000_000_000


@given(st.floats(1e-6, 1e15))
def test_a_load_of_any_size_is_kept_to_within_a_thousandth(load: float) -> None:
    found = value_of(code_of(load))
    assert found is not None
    assert abs(found - load) <= 1e-3 * load


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-4000, 90_000), LOADS), max_size=40))
def test_a_history_survives_any_clock_and_any_load(course: list[tuple[float, Any]]) -> None:
    history, at = LoadHistory(), START
    for step, load in course:
        at += step
        if load is not None:
            history.add(at, load)
        times = [when for when, _ in history.points()]
        assert times == sorted(times)
        assert LoadHistory.from_bytes(history.to_bytes()) == history
