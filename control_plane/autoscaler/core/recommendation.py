"""The size that a job should have now, and why: the decision of one evaluation. Pure.

Without fresh data, while tasks are updated, and while some are not healthy the size is never
reduced, not even to the maximum. Otherwise bounds always hold. Speed limits hold, except where the
bounds need more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

from control_plane.api.autoscale import Autoscale, LoadSignal
from control_plane.api.sizings import Forecast, Recommendation
from control_plane.autoscaler.core.forecast import ForecastState, forecast, learn, slope_of
from control_plane.autoscaler.core.history import LARGEST, SLOT_S, LoadHistory
from control_plane.autoscaler.core.latency import LearntLatency, load_of_task, with_latency
from control_plane.autoscaler.core.sizing import (
    bounds_at,
    highest_allowed,
    lowest_allowed,
    needed,
    with_size,
)
from control_plane.autoscaler.core.ways import LEARNT_S, WaysState, compare

STALE_S = 180.0
"""A measurement older than this is ignored: three evaluations."""
TOLERANCE = 0.05
"""A size that is larger by at most this share is kept: a smaller one would save less than the
restarts cost."""
SETTLE_S = 300.0
"""CPU and memory are ignored for this long after an update: new tasks fill caches (AS10)."""
STEADY_S = 120.0
"""Latency is learnt once the size was constant for this long: the window of a usual query."""
START_S = 300.0
"""New tasks are assumed to take this long until they are healthy, before that was measured."""
MARGIN_S = 120.0
"""Added to that: one evaluation, and one measurement."""
START_MAX_S = 3600.0
RISE_S, RISE_ERRORS, RISE_MAX = 120.0, 3.0, 2.0
"""In the first day of a job forecasts have no basis. A load that exceeds its forecast by three mean
errors is extrapolated from this time, up to twice itself (docs/adr/0218)."""
STARTS_KEPT = 8
"""Start times that are kept; the forecast horizon is the longest of them."""


class JobObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The observation of a job at one time."""

    at: float
    """In seconds since 1970."""
    tasks: int
    """Its size: the wanted number of tasks."""
    healthy: int
    capacity: float
    """Load of one task at target 1: its cores, its bytes, or 1 for a query."""
    load: float | None = None
    """Of the whole job; None: not measured."""
    measured_at: float = 0.0
    missing: str = ""
    """Why there is no load."""
    latency: float | None = None
    """In seconds; None: not measured, or not asked for."""
    latency_at: float = 0.0
    latency_missing: str = ""
    pushing: str = ""
    """Why its tasks are being replaced, or wait for that; empty: none is."""
    msbs: int = 0
    """MSBs that its tasks are spread over; 0: not known."""


class SizingState(msgspec.Struct, frozen=True, kw_only=True):
    """State that an evaluation takes over from the one before, in addition to the history."""

    learnt: ForecastState = ForecastState()
    sizes: tuple[tuple[float, int], ...] = ()
    """Time and size, for the speed limits: observed sizes of any writer."""
    starts: tuple[float, ...] = ()
    """How long the last increases took until all tasks were healthy, in seconds."""
    growing_since: float = 0.0
    """When the size last rose to tasks that are not healthy yet; 0: all are …"""
    grown_from: int = 0
    """… and the size from which it began to rise."""
    observed_at: float = 0.0
    """When the job was last observed: a size that rose since may be as old as that."""
    push_seen: float = 0.0
    """When tasks were last being replaced."""
    predicted: Forecast | None = None
    predicted_for: float = 0.0
    """When `predicted` was made."""
    ways: WaysState = WaysState()
    latency: LearntLatency = LearntLatency()
    recent: tuple[tuple[float, float], ...] = ()
    """Time and load of the last `RISE_S`, in the first day."""


@dataclass(slots=True)
class JobSizing:
    """All state that is kept of one job: `advance` changes it, and returns the recommendation."""

    history: LoadHistory = field(default_factory=LoadHistory)
    state: SizingState = field(default_factory=SizingState)

    def advance(self, policy: Autoscale, seen: JobObservation) -> Recommendation:
        """Record an observation, and return the size that the job should have."""
        self._note_sizes(policy, seen)
        slots = self._slots(policy)
        load = fresh_load(policy, seen, self.state.push_seen)
        if self.history.go_back(seen.at):
            self._set(predicted=None, learnt=msgspec.structs.replace(self.state.learnt, pending=()))
        if load is not None:
            closed = self.history.add(seen.measured_at, load)
            learnt, stale = self.state.learnt, self.state.predicted is None
            if closed is not None:
                learnt = learn(self.history, learnt, slots, policy.quantile)
            if closed is not None or stale:
                found = forecast(self.history, learnt, slots)
                self._set(learnt=learnt, predicted=found, predicted_for=seen.at)
        predicted = self.state.predicted
        if predicted is not None and seen.at - self.state.predicted_for > SLOT_S + STALE_S:
            predicted = None
        predicted = self._with_rise(policy, seen, load, predicted)
        policy, why = self._by_latency(policy, seen, load)
        per_task = (policy.target or 0.0) * seen.capacity
        ahead = _counted(load, predicted)
        if load is not None and ahead is not None and per_task > 0:
            start_s = max(self.state.starts, default=START_S)
            measured = seen.at, load, ahead
            ways = compare(self.state.ways, policy.quantile, measured, per_task, start_s)
            self._set(ways=ways)
        return recommend(policy, seen, load, predicted, self.state, why)

    def _with_rise(
        self,
        policy: Autoscale,
        seen: JobObservation,
        load: float | None,
        predicted: Forecast | None,
    ) -> Forecast | None:
        """Return the forecast, or the line of the last minutes where the load is above it."""
        if load is None or self.state.ways.learnt_s >= LEARNT_S:
            return predicted
        at = seen.measured_at
        before = [(t, v) for t, v in self.state.recent if at - RISE_S <= t < at]
        recent = (*before, (at, load))
        self._set(recent=recent)
        slope = slope_of(recent)
        known = math.inf if predicted is None else predicted.expected
        usual = known * math.exp(RISE_ERRORS * self.state.learnt.error)
        if slope is None or slope <= 0 or load <= usual:
            return predicted
        horizon = horizon_s(policy, self.state.starts)
        ahead = min(load + slope * horizon, load * RISE_MAX)
        return Forecast(load=ahead, expected=ahead, by={"rise": 1.0}, horizon_s=horizon)

    def resolved(
        self, policy: Autoscale, now: tuple[float, float] | None = None
    ) -> tuple[Autoscale, str]:
        """Return the policy with its latency converted to a target load, and why; None: unknown.

        `now` is the present load of a task and its latency.
        """
        if policy.latency is None:
            return policy, ""
        target, most, why = load_of_task(policy.latency, policy.target, self.state.latency, now)
        return msgspec.structs.replace(policy, target=target, ceiling=most), why

    def _by_latency(
        self, policy: Autoscale, seen: JobObservation, load: float | None
    ) -> tuple[Autoscale, str]:
        """Learn from the present latency, and return the policy that follows from it."""
        latency, state = fresh_latency(seen), self.state
        if policy.latency is None:
            return policy, ""
        pushed = state.push_seen > 0 and seen.at - state.push_seen < SETTLE_S
        if load is None or latency is None or seen.healthy < 1 or pushed:
            return self.resolved(policy)
        each = load / seen.healthy
        steady = seen.at - state.sizes[-1][0] >= STEADY_S and not state.growing_since
        steady = steady and seen.healthy >= seen.tasks
        if steady or latency > policy.latency.limit_s:
            measured = seen.latency_at, each, latency
            self._set(latency=with_latency(state.latency, policy.latency, *measured))
        return self.resolved(policy, (each, latency))

    def _set(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def _slots(self, policy: Autoscale) -> int:
        return math.ceil(horizon_s(policy, self.state.starts) / SLOT_S)

    def _note_sizes(self, policy: Autoscale, seen: JobObservation) -> None:
        state = self.state
        before = state.sizes[-1][1] if state.sizes else seen.tasks
        since, starts, grown_from = state.growing_since, state.starts, state.grown_from
        if seen.tasks > before:  # the newest tasks are healthy last
            began = max(state.observed_at, seen.at - STALE_S)
            since, grown_from = min(began, seen.at), grown_from if since else before
        if seen.tasks < before:  # starting tasks continue the growth
            since = since if seen.healthy < seen.tasks else 0.0
        elif since and seen.healthy >= seen.tasks:
            took = min(max(0.0, seen.at - since), START_MAX_S)
            starts, since = (*starts, took)[-STARTS_KEPT:], 0.0
        keep_s = max(policy.up.per_s, policy.down.per_s)
        self._set(
            sizes=with_size(state.sizes, seen.tasks, seen.at, keep_s),
            starts=starts,
            growing_since=since,
            grown_from=grown_from,
            push_seen=seen.at if seen.pushing else min(state.push_seen, seen.at),
            observed_at=seen.at,
        )


def horizon_s(policy: Autoscale, starts: tuple[float, ...]) -> float:
    """Return how far ahead the size must look: until tasks that are added now are healthy."""
    return policy.horizon_s or max(starts, default=START_S) + MARGIN_S


def fresh_load(policy: Autoscale, seen: JobObservation, push_seen: float) -> float | None:
    """Return the load if it counts: recent, a number, and not of tasks that just start."""
    load = seen.load
    if load is None or not math.isfinite(load) or load < 0:
        return None
    if not -STALE_S <= seen.at - seen.measured_at <= STALE_S:
        return None
    spiked = push_seen > 0 and seen.at - push_seen < SETTLE_S
    return None if spiked and policy.signal is not LoadSignal.QUERY else min(load, LARGEST)


def fresh_latency(seen: JobObservation) -> float | None:
    """Return the latency if it is recent and a valid time."""
    latency = seen.latency
    if latency is None or not math.isfinite(latency) or latency < 0:
        return None
    return latency if abs(seen.at - seen.latency_at) <= STALE_S else None


def recommend(
    policy: Autoscale,
    seen: JobObservation,
    load: float | None,
    predicted: Forecast | None,
    state: SizingState,
    why: str = "",
) -> Recommendation:
    """Return the size for a load that was measured, and for its forecast.

    `why` is what the target of the policy follows from; empty: the owner wrote it.
    """
    low, high, schedule = bounds_at(policy, seen.at)
    counted, followed = _followed(seen, load, predicted, state)
    if counted is None or seen.capacity <= 0 or policy.target is None:
        return _hold(seen, low, _why_missing(policy, seen, why))
    size = needed(policy, counted, seen.capacity, seen.msbs)
    of_load = _why(policy, seen, counted, load, predicted)
    notes = [why, of_load, followed, f"{size.tasks} tasks needed"]
    if size.tasks > size.at_target:
        reserve = f"plus a reserve for the loss of 1 of {seen.msbs} MSBs"
        notes.append(f"{size.at_target} at target, {reserve}")
    bounded = min(max(size.tasks, low), high)
    if bounded != size.tasks:
        when = f" ({schedule} UTC)" if schedule else ""
        notes.append(f"bounds are {low} to {high}{when}")
    held = _why_held(policy, seen, load, bounded, state) if bounded < seen.tasks else ""
    if held:
        tasks = max(seen.tasks, low)
        notes.append(f"kept at {tasks}: {held}")
    else:
        tasks, note = _allowed(policy, seen, bounded, state, (low, high))
        notes.append(note)
    return Recommendation(
        at=seen.at,
        tasks=tasks,
        was=seen.tasks,
        reason="; ".join(filter(None, notes)),
        wanted=size.tasks,
        held=held,
        load=load,
        forecast=predicted,
        capacity=seen.capacity,
    )


def _followed(
    seen: JobObservation, load: float | None, predicted: Forecast | None, state: SizingState
) -> tuple[float | None, str]:
    """Return the load to size for, and why it is not that of the forecast; empty: it is."""
    if load is not None and state.ways.at == seen.at and (why := state.ways.explained()):
        return max(load, state.ways.load_of(state.ways.cheapest)), why
    return _counted(load, predicted), ""


def _allowed(
    policy: Autoscale, seen: JobObservation, tasks: int, state: SizingState, bounds: tuple[int, int]
) -> tuple[int, str]:
    """Return the size that speed limits and starting tasks allow, and why it is another one."""
    low, high = bounds
    limited = _limited(policy, seen, tasks, state.sizes)
    allowed = min(max(limited, _least(seen, tasks, state), low), high)
    if limited != tasks:
        way = policy.up if limited < tasks else policy.down
        return allowed, f"speed limit of {way.share:.0%} in {way.per_s:g} s: {allowed} now"
    if allowed > max(tasks, low):
        return allowed, f"{allowed} tasks stay until others have started"
    return allowed, ""


def _least(seen: JobObservation, tasks: int, state: SizingState) -> int:
    """Return the tasks that a smaller size keeps while tasks start: serving and earlier ones."""
    starting = tasks < seen.tasks and seen.healthy < seen.tasks
    return min(max(seen.healthy, state.grown_from), seen.tasks) if starting else 0


def _why_held(
    policy: Autoscale,
    seen: JobObservation,
    load: float | None,
    tasks: int,
    state: SizingState,
) -> str:
    """Return why a job does not get a smaller size now; empty: it may."""
    if seen.pushing:
        return f"not reduced: {seen.pushing}"
    if load is None:
        return "not reduced: the load is not measured now"
    ill = seen.healthy < seen.tasks
    if ill and not (state.growing_since and _least(seen, tasks, state) < seen.tasks):
        return f"not reduced: {seen.healthy} of {seen.tasks} tasks are healthy"
    if policy.latency is not None and load > 0 and fresh_latency(seen) is None:
        why = seen.latency_missing or "it is stale or not a time"
        return f"not reduced: the latency is not measured: {why}"
    if seen.tasks * (1 - TOLERANCE) <= tasks and seen.tasks <= bounds_at(policy, seen.at)[1]:
        return f"within {TOLERANCE:.0%} of the present size"
    return ""


def _counted(load: float | None, predicted: Forecast | None) -> float | None:
    """Return the larger of both, ignoring a forecast that is no number."""
    known = [load, predicted.load if predicted is not None else None]
    return max((v for v in known if v is not None and math.isfinite(v) and v >= 0), default=None)


def _limited(
    policy: Autoscale, seen: JobObservation, tasks: int, sizes: tuple[tuple[float, int], ...]
) -> int:
    known = sizes or ((seen.at, seen.tasks),)
    if tasks > seen.tasks:
        return max(seen.tasks, min(tasks, highest_allowed(known, policy.up, seen.at)))
    if tasks < seen.tasks:
        return min(seen.tasks, max(tasks, lowest_allowed(known, policy.down, seen.at)))
    return tasks


def _hold(seen: JobObservation, low: int, why: str) -> Recommendation:
    tasks = max(seen.tasks, low)
    return Recommendation(
        at=seen.at,
        tasks=tasks,
        was=seen.tasks,
        reason=f"kept at {tasks}: {why}",
        held=why,
        capacity=seen.capacity,
    )


def _why_missing(policy: Autoscale, seen: JobObservation, why: str) -> str:
    if seen.capacity <= 0:
        return f"the job has no limit to which {policy.signal.value} could be related"
    if seen.load is None:
        return seen.missing or "the load is not known"
    if policy.target is None:
        return why or "there is no target"
    if not math.isfinite(seen.load) or seen.load < 0:
        return f"the load is {seen.load:g}, which is not valid"
    age = seen.at - seen.measured_at
    if abs(age) > STALE_S:
        return f"the last measurement is {age:.0f} s old"
    return "tasks are being replaced, and there is no forecast yet"


def _why(
    policy: Autoscale,
    seen: JobObservation,
    counted: float,
    load: float | None,
    predicted: Forecast | None,
) -> str:
    units = {LoadSignal.CPU: " cores", LoadSignal.MEMORY: " bytes", LoadSignal.NETWORK: " B/s"}
    unit = units.get(policy.signal, "")
    measured = "not measured" if load is None else f"{load:.4g}{unit}"
    ahead = ""
    if predicted is not None:
        ahead = f", at most {predicted.load:.4g}{unit} within {predicted.horizon_s:g} s"
    each = (policy.target or 0.0) * seen.capacity
    return f"load {measured}{ahead}: {counted:.4g} at {each:.4g}{unit} a task"
