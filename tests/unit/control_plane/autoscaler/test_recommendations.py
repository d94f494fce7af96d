"""Which size a job should have, and the stated reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from control_plane.api.autoscale import Headroom, LoadSignal, ScheduledBounds, SpeedLimit, Weekday
from control_plane.api.sizings import Forecast, Recommendation
from control_plane.autoscaler.core.recommendation import (
    SETTLE_S,
    STALE_S,
    JobSizing,
    SizingState,
    horizon_s,
    recommend,
)
from control_plane.autoscaler.core.replay import simulate
from control_plane.autoscaler.core.sizing import (
    bounds_at,
    tasks_for,
    tasks_for_survivors,
    tasks_needed,
)
from tests.unit.control_plane.autoscaler.sizing_builders import NOON, a_policy, seen

FREE = {"up": SpeedLimit(share=100, per_s=60), "down": SpeedLimit(share=100, per_s=60)}


def of(load: float | None, tasks: int = 10, policy: Any = None, **changes: Any) -> Recommendation:
    observed = seen(load, tasks, **changes)
    counted = load if load is not None and math.isfinite(load) else None
    return recommend(policy or a_policy(**FREE), observed, counted, None, SizingState())


def test_sizes_are_rounded_up_but_not_for_a_millionth() -> None:
    assert [tasks_for(load, 1.0) for load in (0.0, 0.1, 4.0, 4.0000001, 4.01)] == [0, 1, 4, 4, 5]


@pytest.mark.behaviour("AS1")
def test_the_size_carries_the_load_at_the_target() -> None:
    found = of(12.5)  # at 50 % of 2 cores per task
    assert found.tasks == 13
    assert "load 12.5 cores" in found.reason
    assert "at 1 cores a task; 13 tasks needed" in found.reason


def test_the_larger_of_load_and_forecast_counts() -> None:
    ahead = Forecast(load=30.0, expected=28.0, horizon_s=420.0)
    found = recommend(a_policy(**FREE), seen(12.0), 12.0, ahead, SizingState())
    assert found.tasks == 30
    assert "at most 30 cores within 420 s" in found.reason


@pytest.mark.parametrize(
    ("survivors", "msbs", "tasks"), [(10, 6, 12), (10, 2, 20), (9, 4, 12), (1, 3, 2), (5, 1, 5)]
)
def test_enough_tasks_survive_the_loss_of_an_msb(survivors: int, msbs: int, tasks: int) -> None:
    assert tasks_for_survivors(survivors, msbs) == tasks


def test_headroom_is_what_the_loss_of_an_msb_needs() -> None:
    policy = a_policy(headroom=Headroom.MSB, **FREE)
    assert tasks_needed(policy, 10.0, 2.0, msbs=6).tasks == 12
    found = of(10.0, policy=policy, msbs=6)
    assert found.tasks == 12
    assert "plus a reserve for the loss of 1 of 6 MSBs" in found.reason


def test_a_ceiling_above_the_target_takes_fewer_tasks_for_a_loss() -> None:
    policy = a_policy(headroom=Headroom.MSB, ceiling=0.6, target=0.5)
    assert (
        tasks_needed(policy, 60.0, 2.0, msbs=6).tasks == 60
    )  # the target already includes this reserve


def test_bounds_are_kept_and_named() -> None:
    assert of(1000.0).tasks == 100
    assert of(0.0).tasks == 2
    assert "bounds are 2 to 100" in of(0.0).reason


def test_a_schedule_raises_the_minimum_at_its_time() -> None:
    entry = ScheduledBounds(days=[Weekday.FRI], start="11:00", end="13:00", minimum=40)
    policy = a_policy(schedule=[entry], **FREE)
    assert of(5.0, policy=policy).tasks == 40
    assert "(11:00 to 13:00 UTC)" in of(5.0, policy=policy).reason
    assert bounds_at(policy, NOON + 86_400)[:2] == (2, 100)


@pytest.mark.behaviour("AS1")
@pytest.mark.parametrize(
    ("days", "dates", "applies"),
    [
        ([], ["10-04"], True),  # in each year
        ([], ["2024-10-04", "12-24"], True),
        ([], ["2023-10-04", "10-05"], False),
        ([Weekday.SUN], ["10-04"], True),  # one of the two matches
        ([Weekday.SUN], ["10-05"], False),
        ([Weekday.FRI], ["10-05"], True),
    ],
)
def test_a_schedule_knows_days_of_the_year(
    days: list[Weekday], dates: list[str], applies: bool
) -> None:
    """An owner can list holidays. The test's day is Friday, 4 October 2024."""
    entry = ScheduledBounds(days=days, dates=dates, start="11:00", end="13:00", minimum=40)
    assert bounds_at(a_policy(schedule=[entry]), NOON)[0] == (40 if applies else 2)


def test_a_schedule_continues_past_midnight() -> None:
    entry = ScheduledBounds(days=[Weekday.FRI], start="22:00", end="02:00", maximum=5)
    policy = a_policy(schedule=[entry])
    friday = NOON - 43_200
    assert [bounds_at(policy, friday + h * 3600)[1] for h in (1, 21, 22, 25, 26)] == [
        *(100, 100, 5, 5, 100)
    ]


def test_a_minimum_of_the_schedule_wins_over_its_maximum() -> None:
    schedule = [
        ScheduledBounds(start="00:00", end="23:59", minimum=20),
        ScheduledBounds(start="00:00", end="23:59", maximum=5),
    ]
    assert bounds_at(a_policy(schedule=schedule), NOON)[:2] == (20, 20)


@pytest.mark.parametrize("load", [None, math.nan, math.inf, -3.0])
def test_without_a_load_the_size_is_held_and_this_is_reported(load: float | None) -> None:
    found = of(load, tasks=30)
    assert found.tasks == 30
    assert found.held in found.reason
    assert found.reason.startswith("kept at 30: the load is")


def test_a_stale_measurement_is_none() -> None:
    sizing = JobSizing()
    late = seen(1.0, 30, measured_at=NOON - STALE_S - 1)
    assert sizing.advance(a_policy(**FREE), late).reason == (
        "kept at 30: the last measurement is 181 s old"
    )


def test_nothing_is_taken_during_an_update() -> None:
    found = of(5.0, tasks=30, push_reason="an update to version 4 is running")
    assert found.tasks == 30
    assert found.reason.endswith("kept at 30: not reduced: an update to version 4 is running")
    assert of(50.0, tasks=30, push_reason="an update to version 4 failed").tasks == 50


def test_nothing_is_taken_by_a_scheduled_maximum_during_an_update() -> None:
    entry = ScheduledBounds(start="00:00", end="23:59", maximum=5)
    policy = a_policy(schedule=[entry], **FREE)
    assert of(5.0, tasks=30, policy=policy, push_reason="an update is running").tasks == 30
    assert of(5.0, tasks=30, policy=policy).tasks == 5


def test_nothing_is_taken_while_tasks_are_not_healthy() -> None:
    assert of(5.0, tasks=30, healthy=28).held == "not reduced: 28 of 30 tasks are healthy"


@pytest.mark.behaviour("AS1")
def test_added_tasks_are_removed_while_they_start() -> None:
    """A burst has ended. Serving tasks stay, and at least as many tasks as before the burst."""
    policy, sizing = a_policy(**FREE), JobSizing()
    sizing.advance(policy, seen(10.0, 10))
    sizing.advance(policy, seen(30.0, 30, at=NOON + 60, healthy=10))
    found = sizing.advance(policy, seen(8.0, 30, at=NOON + 120, healthy=15))
    assert (found.tasks, found.held) == (15, "")
    assert found.reason.endswith("15 tasks stay until others have started")
    ill = sizing.advance(policy, seen(10.0, 30, at=NOON + 180, healthy=7))
    assert ill.tasks == 12  # although three of them do not serve
    before = sizing.advance(policy, seen(2.0, 10, at=NOON + 240, healthy=7))
    assert before.tasks >= 10


def test_a_start_is_measured_from_the_last_rise() -> None:
    """A load that rises for long does not make the measured starts long.

    An observed size may have been written right after the previous observation.
    """
    policy, sizing = a_policy(), JobSizing()
    for minute in range(30):
        sizing.advance(policy, seen(10.0, 10 + minute, at=NOON + 60 * minute, healthy=10))
    sizing.advance(policy, seen(10.0, 39, at=NOON + 60 * 31))
    assert sizing.state.starts == (180.0,)


def test_a_start_within_one_evaluation_takes_that_long_and_not_no_time() -> None:
    sizing = JobSizing()
    sizing.advance(a_policy(), seen(10.0, 10))
    sizing.advance(a_policy(), seen(10.0, 20, at=NOON + 60))
    assert sizing.state.starts == (60.0,)


def test_a_slightly_larger_size_is_kept() -> None:
    assert of(29.0, tasks=30).tasks == 30
    assert of(28.0, tasks=30).tasks == 28


def test_speed_limits_hold_and_are_named() -> None:
    found = of(80.0, policy=a_policy())
    assert found.tasks == 20
    assert "speed limit of 100% in 300 s: 20 now" in found.reason
    assert of(10.0, tasks=50, policy=a_policy()).tasks == 45


def test_a_minimum_wins_over_the_speed_limit() -> None:
    assert of(10.0, tasks=1, policy=a_policy(minimum=30)).tasks == 30


@pytest.mark.behaviour("AS1")
def test_an_absurd_forecast_is_held_by_the_limits() -> None:
    """The speed limit and the maximum bound the effect of a wrong forecast."""
    for load in (1e30, math.inf, math.nan):
        mad = Forecast(load=load, expected=load)
        assert recommend(a_policy(), seen(10.0), 10.0, mad, SizingState()).tasks <= 20


@pytest.mark.behaviour("AS1")
@pytest.mark.parametrize("step_s", [-86_400.0, -3600.0, -90.0, 90.0, 3600.0, 86_400.0])
@pytest.mark.parametrize("whose", ["autoscaler", "server"])
def test_a_clock_that_steps_takes_no_task_and_adds_few(step_s: float, whose: str) -> None:
    """The clock of the autoscaler's host or of the server steps. An hour later the sizes are right
    again."""
    policy, sizing = a_policy(headroom=Headroom.NONE), JobSizing()
    tasks = 10
    for minute in range(120):
        now = NOON + 60.0 * minute
        stepped = now + (step_s if minute >= 30 else 0.0)
        at = stepped if whose == "autoscaler" else now
        found = sizing.advance(policy, seen(9.5, tasks, at=at, measured_at=stepped))
        assert 10 <= found.tasks <= 12
        tasks = found.tasks
    assert tasks <= 11 or whose == "server"


@pytest.mark.behaviour("AS1", "AS2")
def test_gaps_in_measurements_remove_no_task() -> None:
    """With half of the points missing, the size still follows the load and never falls."""
    policy, sizing = a_policy(**FREE), JobSizing()
    sizes = []
    for minute in range(180):
        load = None if minute % 10 < 5 else 10.0
        tasks = sizes[-1] if sizes else 10
        found = sizing.advance(policy, seen(load, tasks, at=NOON + 60.0 * minute))
        sizes.append(found.tasks)
    assert min(sizes) >= 10
    assert max(sizes) <= 13


@pytest.mark.behaviour("AS10")
def test_cpu_spikes_of_an_update_are_not_load() -> None:
    policy, sizing = a_policy(**FREE), JobSizing()
    for minute in range(30):
        sizing.advance(policy, seen(10.0, at=NOON + 60 * minute))
    at = NOON + 1800
    spike = sizing.advance(policy, seen(40.0, at=at, push_reason="an update is running"))
    after = sizing.advance(policy, seen(40.0, at=at + SETTLE_S - 1))
    assert spike.tasks <= 13
    assert after.tasks <= 13
    assert sizing.history.mean(int(at // 300)) is None
    assert sizing.advance(policy, seen(40.0, at=at + SETTLE_S)).tasks >= 40


def test_requests_are_load_during_an_update_too() -> None:
    policy = a_policy(**FREE, signal=LoadSignal.QUERY, query="q")
    pushed = seen(40.0, push_reason="an update is running")
    assert JobSizing().advance(policy, pushed).tasks >= 40


def test_the_horizon_is_the_slowest_of_the_last_starts() -> None:
    policy, sizing = a_policy(), JobSizing()
    assert horizon_s(policy, sizing.state.starts) == 420.0
    sizing.advance(policy, seen(10.0, 10))
    sizing.advance(policy, seen(10.0, 20, at=NOON + 60, healthy=10))
    sizing.advance(policy, seen(10.0, 20, at=NOON + 600, healthy=19))
    sizing.advance(policy, seen(10.0, 20, at=NOON + 660))
    assert sizing.state.starts == (660.0,)
    assert horizon_s(policy, sizing.state.starts) == 780.0
    assert horizon_s(a_policy(horizon_s=90.0), sizing.state.starts) == 90.0


def test_the_first_evaluations_forecast_from_the_present_load() -> None:
    found = JobSizing().advance(a_policy(**FREE), seen(10.0))
    assert found.forecast is not None
    assert found.forecast.by == {"last": 0.5, "mean": 0.5}


@pytest.mark.behaviour("BUG-CP68")
def test_a_forecast_ends_when_the_clock_is_set_back() -> None:
    """Formerly the forecast of the later date was followed for the whole length of the step."""
    policy, sizing = a_policy(**FREE), JobSizing()
    for minute in range(60):
        sizing.advance(policy, seen(50.0, 60, at=NOON + 60.0 * minute))
    back = NOON - 86_400.0
    for minute in range(40):
        found = sizing.advance(policy, seen(10.0, 60, at=back + 60.0 * minute))
    assert found.wanted <= 12
    assert sizing.state.predicted_for > back + 1800.0


@pytest.mark.behaviour("BUG-CP69")
def test_no_number_of_an_owner_ends_the_evaluation() -> None:
    """A tiny target, and loads whose sum is infinite."""
    sizing = JobSizing()
    tiny = a_policy(target=5e-324)
    assert sizing.advance(tiny, seen(1.0, 10, capacity=0.1)).tasks > 10
    for minute in range(10):
        found = sizing.advance(a_policy(), seen(1.7e308, 10, at=NOON + 60.0 * minute))
        assert found.load == 1e15
        assert found.forecast is None or math.isfinite(found.forecast.load)


@pytest.mark.behaviour("BUG-CP73")
def test_a_target_in_the_wrong_unit_is_simulated_at_once() -> None:
    """Formerly a billion tasks were removed one by one, and nothing else ran meanwhile."""
    points = [(NOON + 300.0 * slot, 5e8) for slot in range(24)]
    wrong, right = a_policy(target=0.5), a_policy(target=1e7)
    found = simulate("web", points, (wrong, right), 1.0, 0, ())
    assert found.other.peak_size == found.own.peak_size == 100
