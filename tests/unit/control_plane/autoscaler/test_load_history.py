"""The history of a load: what it keeps, how long, and in how many bytes."""

from __future__ import annotations

import math

import pytest

from control_plane.autoscaler.core.history import (
    BYTES,
    DAY_S,
    DAYS,
    FINE,
    SLOT_S,
    LoadHistory,
    code_of,
    value_of,
)

START = 20_000 * DAY_S


def filled(days: int, load: float = 5.0) -> LoadHistory:
    history = LoadHistory()
    for slot in range(days * 288):
        history.add(START + slot * SLOT_S, load + slot % 7)
    return history


def test_10_000_histories_of_a_year_take_79_mb() -> None:
    history = filled(380)
    assert len(history.to_bytes()) == BYTES == 7876
    assert len(LoadHistory().to_bytes()) == BYTES
    assert BYTES * 10_000 < 79e6


@pytest.mark.parametrize("value", [1e-6, 0.013, 1.0, 97.3, 123_456.0, 1e15])
def test_a_load_is_kept_to_within_four_hundredths_of_a_percent(value: float) -> None:
    assert value_of(code_of(value)) == pytest.approx(value, rel=4e-4)


def test_zero_is_a_load_and_missing_is_none() -> None:
    assert value_of(code_of(0.0)) == 0.0
    assert value_of(0) is None
    assert value_of(code_of(1e300)) == pytest.approx(1e15, rel=1e-3)


def test_a_stored_history_continues_where_it_ended() -> None:
    history, other = filled(5), filled(5)
    other = LoadHistory.from_bytes(other.to_bytes())
    for each in (history, other):
        each.add(START + 5 * DAY_S + 10, 3.0)
        each.add(START + 5 * DAY_S + 70, 5.0)
    assert other == history
    assert other.mean(other.slot) == pytest.approx(4.0, rel=1e-3)


def test_a_damaged_or_newer_history_is_refused() -> None:
    data = filled(1).to_bytes()
    with pytest.raises(ValueError, match="7876 bytes, not 7875"):
        LoadHistory.from_bytes(data[:-1])
    with pytest.raises(ValueError, match="format 9"):
        LoadHistory.from_bytes(b"\x09\x00" + data[2:])


def test_it_forgets_in_three_steps() -> None:
    history = filled(100)
    newest = history.slot
    assert history.mean(newest - FINE + 1) is not None
    assert history.mean(newest - FINE) is None
    half = newest // 6
    assert history.peak(half - 2687) is not None
    assert history.peak(half - 2688) is None
    day = newest * SLOT_S // DAY_S
    assert history.day_peak(day - 99) == pytest.approx(11.0, rel=1e-3)
    assert history.day_peak(day - DAYS) is None


@pytest.mark.behaviour("BUG-UX153")
def test_recent_loads_and_peaks_of_days_are_listed_oldest_first() -> None:
    assert LoadHistory().day_peaks() == LoadHistory().recent() == []
    history = filled(500)
    peaks, loads, newest = history.day_peaks(), history.recent(), history.slot * float(SLOT_S)
    assert (len(peaks), len(loads)) == (DAYS, FINE)
    assert peaks == sorted(peaks)
    assert (peaks[-1][0], loads[-1][0]) == (newest // DAY_S * DAY_S, newest)
    assert [load for _, load in peaks] == [history.day_peak(int(at // DAY_S)) for at, _ in peaks]
    assert loads[0] == (newest - (FINE - 1) * SLOT_S, history.mean(history.slot - FINE + 1))
    assert len(filled(2).day_peaks()) == 2


def test_a_gap_is_missing_and_not_zero_nor_old() -> None:
    history = filled(3)
    history.add(START + 3 * DAY_S + 7200, 1.0)
    assert history.mean(history.slot - 1) is None
    assert history.peak(history.slot // 6 - 2) is None
    assert history.mean(history.slot) == pytest.approx(1.0, rel=1e-3)


def test_a_gap_of_years_clears_the_history() -> None:
    history = filled(3)
    history.add(START + 2000 * DAY_S, 1.0)
    assert [load for _, load in history.points()] == [pytest.approx(1.0, rel=1e-3)]


@pytest.mark.parametrize("load", [math.nan, math.inf, -math.inf, -1.0])
def test_an_invalid_load_changes_nothing(load: float) -> None:
    history = filled(1)
    before = history.to_bytes()
    assert history.add(START + 10 * DAY_S, load) is None
    assert history.to_bytes() == before


def test_earlier_points_are_dropped() -> None:
    history = filled(1)
    before = history.to_bytes()
    assert history.add(START, 1e6) is None
    assert history.to_bytes() == before


def test_its_points_are_half_hours_and_then_slots() -> None:
    history = filled(10)
    times = [at for at, _ in history.points()]
    assert times == sorted(times)
    assert len(times) == 864 + 7 * 48
    assert times[0] == START


@pytest.mark.behaviour("BUG-CP68")
def test_a_clock_that_was_set_back_drops_later_history() -> None:
    """Formerly new points were dropped until the later time came, for days or years."""
    history, now = filled(10), START + 10 * DAY_S
    for late in (2 * DAY_S, 400 * DAY_S):
        history.add(now + late, 7.0)
        assert not history.drop_after(now + late - 3000)
        assert history.drop_after(now)
        history.add(now, 6.0)
        assert history.mean(int(now // 300)) == pytest.approx(6.0, rel=1e-3)
        assert history.points()[-1] == (now, pytest.approx(6.0, rel=1e-3))
        assert history.day_peak(int((now + late) // DAY_S)) is None


@pytest.mark.behaviour("BUG-CP69")
def test_the_largest_numbers_are_stored() -> None:
    """Formerly the sum of such numbers was infinite, and ended the autoscaler."""
    history = LoadHistory()
    for second in range(3):
        history.add(START + second, 1.7e308)
    assert history.mean(int(START // 300)) == pytest.approx(1e15, rel=1e-3)
