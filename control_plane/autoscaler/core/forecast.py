"""Forecasts the highest load within the next minutes by five predictors, weighted by accuracy.

`last` repeats the last minutes, `mean` and `trend` extend the last half hour, `days` and `weeks`
follow the same time of former days and weeks, scaled to the last half hour. Each closed 5-minute
slot scores the forecasts that ended with it. Their errors change the weights. A margin is corrected
online so that the wanted share of forecasts holds (adaptive conformal inference, Gibbs and Candès
2021).
docs/adr/0160 compares the measured cost with other rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from control_plane.api.sizings import Forecast
from control_plane.autoscaler.core.history import HALF_HOUR_S, SLOT_S, LoadHistory

PREDICTORS = ("last", "mean", "trend", "days", "weeks")
HORIZON_SLOTS_MAX = 24
"""A forecast reaches two hours at most."""
_DAY, _WEEK = 288, 2016
"""Slots of a day and of a week."""
_RECENT = 6
"""Slots of the last half hour."""
_FORGET = 0.02
"""Weight of the newest error in the mean error. Half of the mean is from the last three hours."""
_SHARPNESS = 3.0
"""Exponent of the weight by error. With a larger one, nearly only the best predictor counts."""
_CORRECTION = 0.1
"""Step of the margin, in mean errors, after a forecast that did not hold."""
_MARGIN_MIN, _MARGIN_MAX = -0.1, 0.7
_SCALE_MIN, _SCALE_MAX = 0.2, 5.0
"""Scale of a season to the last half hour; outside these bounds it is ignored."""
_UNKNOWN_ERROR = 0.1
"""Mean error of a predictor without a scored forecast."""
_FLOOR = 1e-9


class PendingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast whose period has not ended."""

    slot: int
    """The slot in which it was made; it predicts the `slots` after that."""
    slots: int
    predicted: tuple[float | None, ...]
    """By predictor."""
    combined: float


class ForecastState(msgspec.Struct, frozen=True, kw_only=True):
    """The learnt state about the forecasts of one job."""

    errors: tuple[float, ...] = (_UNKNOWN_ERROR,) * len(PREDICTORS)
    """Mean error of each predictor, as an absolute logarithm: 0.1 is about 10 %."""
    error: float = _UNKNOWN_ERROR
    """Mean error of the combined forecasts."""
    margin: float = 0.1
    """Logarithm of the factor with which the wanted share of forecasts holds."""
    pending: tuple[PendingForecast, ...] = ()
    scored: int = 0
    """Forecasts that were scored so far."""
    held: int = 0
    """Scored forecasts that the load did not exceed."""


def predict(history: LoadHistory, slots: int) -> tuple[float | None, ...]:
    """Return each predictor's highest load of the next slots; None: it has too little history.

    The open slot counts as complete.
    """
    slots = max(1, min(slots, HORIZON_SLOTS_MAX))
    now, recent = history.slot, _recent(history)
    if not recent:
        return (None,) * len(PREDICTORS)
    last = recent[-1][1]
    slope = slope_of(recent)
    trend = max(0.0, last + slope * slots) if slope is not None else None

    def of_days(slot: int) -> float | None:
        return _weighted((history.mean(slot - _DAY * d), 0.6**d) for d in (1, 2))

    def of_weeks(slot: int) -> float | None:
        weeks = ((_half_hours(history, slot - _WEEK * w), 0.6**w) for w in (1, 2, 3, 4))
        return _weighted(weeks)

    days = _seasonal(of_days, recent, now, slots)
    weeks = _seasonal(of_weeks, recent, now, slots)
    mean = sum(load for _, load in recent) / len(recent)
    return last, mean, trend, days, weeks


def _recent(history: LoadHistory) -> list[tuple[int, float]]:
    slots = range(history.slot - _RECENT + 1, history.slot + 1)
    found = ((slot, history.mean(slot)) for slot in slots)
    return [(slot, load) for slot, load in found if load is not None]


def slope_of(recent: Sequence[tuple[float, float]]) -> float | None:
    """Return the least-squares slope of points (time, load); None for fewer than three."""
    if len(recent) < 3:
        return None
    mean_x = sum(x for x, _ in recent) / len(recent)
    mean_y = sum(y for _, y in recent) / len(recent)
    return sum((x - mean_x) * (y - mean_y) for x, y in recent) / sum(
        (x - mean_x) ** 2 for x, _ in recent
    )


def _half_hours(history: LoadHistory, slot: int) -> float | None:
    """Return the load around a slot, between the peaks of two half hours."""
    at = (slot + 0.5) * SLOT_S / HALF_HOUR_S - 0.5
    lower = math.floor(at)
    before, after = history.peak(lower), history.peak(lower + 1)
    if before is None or after is None:
        return before if after is None else after
    return before + (after - before) * (at - lower)


def _weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(v * w for v, w in known) / total if known else None


def _seasonal(
    former: Callable[[int], float | None], recent: Sequence[tuple[int, float]], now: int, slots: int
) -> float | None:
    """Return the highest former load of the next slots' time, scaled to the last half hour.

    `former` returns the load at the same time of earlier days or weeks.
    """
    pairs = [(load, former(slot)) for slot, load in recent]
    known = [(load, old) for load, old in pairs if old is not None]
    ahead = [v for s in range(now + 1, now + slots + 1) if (v := former(s)) is not None]
    former_sum = sum(old for _, old in known)
    if not ahead or former_sum <= _FLOOR:
        return None
    scale = sum(load for load, _ in known) / former_sum
    if not _SCALE_MIN <= scale <= _SCALE_MAX:
        return None
    return max(ahead) * scale


def forecast(history: LoadHistory, state: ForecastState, slots: int) -> Forecast | None:
    """Return the forecast of the next slots; None without a point in the last half hour."""
    predicted = predict(history, slots)
    found = _combine(predicted, state)
    if found is None:
        return None
    expected, by = found
    load = expected * math.exp(state.margin)
    return Forecast(load=load, expected=expected, by=by, horizon_s=float(slots * SLOT_S))


def _combine(
    predicted: Sequence[float | None], state: ForecastState
) -> tuple[float, dict[str, float]] | None:
    weights = [
        0.0 if p is None else (error + 0.005) ** -_SHARPNESS
        for p, error in zip(predicted, state.errors, strict=True)
    ]
    total = sum(weights)
    if total == 0:
        return None
    expected = sum(w * p for w, p in zip(weights, predicted, strict=True) if p is not None) / total
    shares = {n: w / total for n, w in zip(PREDICTORS, weights, strict=True) if w}
    return expected, shares


def learn(history: LoadHistory, state: ForecastState, slots: int, quantile: float) -> ForecastState:
    """Return the state after a slot was closed: scores ended forecasts, and adds a new one."""
    closed = history.slot - 1
    due = [p for p in state.pending if p.slot + p.slots <= closed]
    for due_forecast in due:
        state = _score(history, state, due_forecast, quantile)
    pending = tuple(p for p in state.pending if p.slot + p.slots > closed)
    predicted = predict(history, slots)
    found = _combine(predicted, state)
    if found is not None:
        new = PendingForecast(
            slot=history.slot, slots=slots, predicted=predicted, combined=found[0]
        )
        pending = (*pending, new)[-HORIZON_SLOTS_MAX:]
    return msgspec.structs.replace(state, pending=pending)


def _score(
    history: LoadHistory, state: ForecastState, made: PendingForecast, quantile: float
) -> ForecastState:
    slots = range(made.slot + 1, made.slot + made.slots + 1)
    loads = [load for slot in slots if (load := history.mean(slot)) is not None]
    if len(loads) < made.slots:
        return state  # a gap: whether the forecast held is unknown
    actual = max(loads)
    errors = tuple(
        error if p is None else error + _FORGET * (_log_error(actual, p) - error)
        for error, p in zip(state.errors, made.predicted, strict=True)
    )
    error = state.error + _FORGET * (_log_error(actual, made.combined) - state.error)
    held = actual <= made.combined * math.exp(state.margin) + _FLOOR
    step = _CORRECTION * max(error, 0.005)
    margin = state.margin + step * (quantile - 1 if held else quantile)
    return ForecastState(
        errors=errors,
        error=error,
        margin=min(max(margin, _MARGIN_MIN), _MARGIN_MAX),
        pending=state.pending,
        scored=state.scored + 1,
        held=state.held + held,
    )


def _log_error(actual: float, predicted: float) -> float:
    """Return the error as an absolute logarithm, at most 2."""
    return min(2.0, abs(math.log((actual + _FLOOR) / (predicted + _FLOOR))))
