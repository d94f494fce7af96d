"""Forecasts: which patterns they follow, and how they learn from their errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from control_plane.autoscaler.core.forecast import ForecastState, forecast, learn, predict
from control_plane.autoscaler.core.history import DAY_S, SLOT_S, LoadHistory

START = 20_000 * DAY_S


def diurnal(at: float) -> float:
    return 100.0 - 60.0 * math.cos((at % DAY_S) / DAY_S * 2 * math.pi)


def learned(
    load: Callable[[float], float], days: float, slots: int = 2, quantile: float = 0.95
) -> tuple[LoadHistory, ForecastState]:
    history, state = LoadHistory(), ForecastState()
    for slot in range(int(days * 288)):
        at = START + slot * SLOT_S
        if history.add(at, load(at)) is not None:
            state = learn(history, state, slots, quantile)
    return history, state


def test_without_history_the_last_load_is_all_there_is() -> None:
    history = LoadHistory()
    assert forecast(history, ForecastState(), 2) is None
    history.add(START, 10.0)
    last, mean, trend, days, weeks = predict(history, 2)
    assert last == mean == pytest.approx(10.0, rel=1e-3)
    assert (trend, days, weeks) == (None, None, None)


@pytest.mark.behaviour("AS2")
def test_a_rise_is_seen_ahead_from_former_days() -> None:
    history, state = learned(diurnal, 14 + 0.25, slots=12)
    found = forecast(history, state, 12)
    assert found is not None
    now = history.slot * SLOT_S
    coming = max(diurnal(now + s * SLOT_S) for s in range(1, 13))
    assert coming > 1.1 * diurnal(now)
    assert coming <= found.load <= 1.1 * coming
    assert found.by["days"] + found.by["weeks"] > 0.7


def test_a_weekend_is_known_from_former_weeks() -> None:
    def weekly(at: float) -> float:
        return diurnal(at) * (0.4 if int(at // DAY_S) % 7 in (2, 3) else 1.0)

    history, _ = learned(weekly, 23 + 0.5)  # a Sunday at noon
    assert int(history.slot * SLOT_S // DAY_S) % 7 == 3
    *_, weeks = predict(history, 2)
    assert weeks == pytest.approx(weekly(history.slot * SLOT_S), rel=0.05)


def test_the_wanted_share_of_forecasts_holds() -> None:
    noise = [1.0 + 0.2 * math.sin(i * 12.9898) for i in range(97)]

    def noisy(at: float) -> float:
        return 100.0 * noise[int(at // SLOT_S) % 97 * 31 % 97]

    for quantile in (0.8, 0.95):
        _, before = learned(noisy, 7, quantile=quantile)
        _, after = learned(noisy, 21, quantile=quantile)
        held = (after.held - before.held) / (after.scored - before.scored)
        assert held == pytest.approx(quantile, abs=0.03)


@pytest.mark.behaviour("AS5")
def test_a_level_that_changed_is_followed_although_the_history_differs() -> None:
    """The load rises suddenly and stays higher for the week."""
    history, state = learned(lambda at: diurnal(at) * (1.8 if at > START + 16 * DAY_S else 1), 16.5)
    found = forecast(history, state, 2)
    assert found is not None
    now = history.slot * SLOT_S
    assert 1.8 * diurnal(now) <= found.load <= 1.3 * 1.8 * diurnal(now)


def test_a_gap_is_not_scored() -> None:
    history, state = learned(diurnal, 3)
    history.add(START + 3 * DAY_S + 3 * 3600, 1e9)
    after = learn(history, state, 2, 0.95)
    assert after.scored == state.scored + 1  # the forecast that ended before the gap
    assert after.errors == pytest.approx(state.errors, abs=1e-3)


def test_after_a_long_gap_a_season_that_does_not_fit_is_left_out() -> None:
    history, _ = learned(diurnal, 14)
    history.add(START + 14 * DAY_S, 1e6)
    history.add(START + 14 * DAY_S + 300, 1e6)
    *_, days, weeks = predict(history, 2)
    assert (days, weeks) == (None, None)
