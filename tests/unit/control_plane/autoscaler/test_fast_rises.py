"""A job without a history grows before a fast rise arrives: the elastic demo without a VM.

The policy, the requests (7 steps of 40 s) and the tasks are those of the demo. A task serves two
requests per second, one after the other, and the proxy gives each task the same share. A rate
covers the last 20 s.
"""

from __future__ import annotations

import tomllib

import msgspec
import pytest

import vm_lab.elastic_demo as demo
from control_plane.api.autoscale import Autoscale
from control_plane.api.sizings import Forecast
from control_plane.autoscaler.core import recommendation
from control_plane.autoscaler.core.recommendation import JobSizing
from control_plane.autoscaler.core.ways import LEARNT_S
from tests.unit.control_plane.autoscaler.sizing_builders import NOON, a_policy, seen

pytestmark = pytest.mark.behaviour("AS1")

POLICY = msgspec.convert(
    tomllib.loads((demo.FILES / "web.toml").read_text())["autoscale"], Autoscale
)
ANSWERED, EVERY, WINDOW, FLAT = 2.0, 10, 20, 600
"""Requests per second that one task serves. In seconds: the interval of the autoscaler, the window
of a rate, and the flat time before the rise."""


def slowest(start_s: int) -> float:
    """Return how long the slowest request takes, in seconds; new tasks serve after `start_s`."""
    sizing, begun, waiting = JobSizing(), [-10_000] * POLICY.minimum, [0.0] * POLICY.minimum
    rates, worst = list[float](), 0.0
    for second in range(FLAT + int(demo.STEPS * demo.STEP_S) + 60):
        step = max(0, min(demo.STEPS, int((second - FLAT) // demo.STEP_S) + 1))
        rates.append(demo.LOW + (demo.HIGH - demo.LOW) * step / demo.STEPS)
        serving = [n for n, at in enumerate(begun) if second - at >= start_s]
        for n in serving:
            waiting[n] = max(0.0, waiting[n] - ANSWERED) + rates[-1] / len(serving)
        worst = max(worst, (max(waiting[n] for n in serving) + 1) / ANSWERED)
        if second % EVERY == 0 and second >= WINDOW:
            load = sum(rates[-WINDOW:]) / WINDOW
            observed = seen(load, len(begun), NOON + second, healthy=len(serving), capacity=1.0)
            size = sizing.advance(POLICY, observed).tasks
            begun = (begun + [second] * size)[:size] if size > len(begun) else begun[:size]
            waiting = (waiting + [0.0] * size)[:size]
    return worst


@pytest.mark.parametrize("start_s", [20, 60, 90])
def test_a_rise_without_history_is_covered(start_s: int) -> None:
    """Half of the demo's limit of 5 s is enough, with tasks that need up to 90 s to serve."""
    assert slowest(start_s) < demo.LATENCY_LIMIT_S / 2


def test_by_the_present_load_alone_it_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo nearly failed like this: the size is late by the start time of a task."""
    monkeypatch.setattr(recommendation, "RISE_MAX", 1.0)
    assert slowest(90) > demo.LATENCY_LIMIT_S


def risen(sizing: JobSizing, step: float = 8.0) -> Forecast | None:
    """Return the forecast after ten flat minutes and three minutes of rising load."""
    found = None
    for minute, load in enumerate([20.0] * 10 + [20 + step * n for n in (1, 2, 3)]):
        found = sizing.advance(a_policy(), seen(load, 100, NOON + 60.0 * minute)).forecast
    return found


def started(start_s: float) -> JobSizing:
    sizing = JobSizing()
    sizing.state = msgspec.structs.replace(sizing.state, starts=(start_s,))
    return sizing


def test_the_rise_is_followed_for_the_time_that_tasks_take_and_up_to_twice_the_load() -> None:
    """The horizon is the measured start time plus 120 s."""
    for start_s, load in ((30.0, 44 + 8 / 60 * 150), (60.0, 44 + 8 / 60 * 180), (600.0, 88.0)):
        found = risen(started(start_s))
        assert found is not None
        assert found.by == {"rise": 1.0}
        assert found.load == pytest.approx(load)


def test_noise_is_no_rise() -> None:
    """A load within three mean errors of the forecast extends nothing."""
    found = risen(started(30.0), step=1.0)
    assert found is not None
    assert "rise" not in found.by


def test_after_a_day_the_forecasts_know_more() -> None:
    sizing = JobSizing()
    ways = msgspec.structs.replace(sizing.state.ways, learnt_s=LEARNT_S)
    sizing.state = msgspec.structs.replace(sizing.state, ways=ways)
    found = risen(sizing)
    assert found is None or "rise" not in found.by
    assert sizing.state.recent == ()
