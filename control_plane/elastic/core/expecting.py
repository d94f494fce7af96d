"""Predicts from its history how many machines a pool will need, at least those that it uses now.

A history has, for each 5 minutes of the last 8 days, the most machines with tasks. The forecast
repeats the use at this time yesterday and a week ago. Without a history it is the present use, and
machines are lent only after they were idle for long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from msgspec.structs import replace

from control_plane.api.elastic import UseHistory

SLOT_S = 300.0
DAY = 288
"""Slots of a day."""
SLOTS = 8 * DAY
"""Slots that are stored: a week and a day, so the hours after "a week ago" are in the history."""


def slot(now: float) -> int:
    """Return the number of the slot of a time in seconds since 1970."""
    return int(now // SLOT_S)


def with_use(history: UseHistory, used: int, now: float) -> UseHistory:
    """Return the history with the present use; missed slots repeat the last value."""
    number, values = slot(now), list(history.used)
    if not values or number < history.last:  # new, or the clock was set back
        return replace(history, last=number, used=[used])
    missed = min(number - history.last, SLOTS)
    if missed == 0:
        values[-1] = max(values[-1], used)
        return replace(history, used=values)
    values += [values[-1]] * (missed - 1) + [used]
    return replace(history, last=number, used=values[-SLOTS:])


def expected(history: UseHistory, used: int, now: float, ahead_s: float) -> int:
    """Return the most machines that a pool is expected to use within the next `ahead_s` seconds."""
    number, most = slot(now), used
    for days in (1, 7):
        first = number - days * DAY
        for earlier in range(first, first + ceil(ahead_s / SLOT_S) + 1):
            index = len(history.used) - 1 - (history.last - earlier)
            if 0 <= index < len(history.used):
                most = max(most, history.used[index])
    return most


def peak(history: UseHistory) -> int:
    """Return the most that was used in the whole history."""
    return max(history.used, default=0)


def growth_by_slot(history: UseHistory, ahead: int) -> dict[int, int]:
    """Return slot → the largest growth of use within the `ahead` slots after it."""
    values, first = history.used, history.last - len(history.used) + 1
    return {
        first + at: max(0, max(values[at : at + ahead + 1]) - value)
        for at, value in enumerate(values[:-1])
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, ceil(share * len(ordered)) - 1))]


def sum_by_slot(parts: Sequence[Mapping[int, int]]) -> list[float]:
    """Return the sum by slot over all parts."""
    slots = sorted({number for part in parts for number in part})
    return [float(sum(part.get(number, 0) for part in parts)) for number in slots]
