"""Decides the size that a job should have now, with the reason: one evaluation. Pure.

The size is never reduced, not even to the maximum, while data is stale, tasks are updated, or some
tasks are not healthy. Otherwise the bounds always hold. Speed limits hold too, except where the
bounds need a faster change.
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
from control_plane.autoscaler.core.observing import JobObservation
from control_plane.autoscaler.core.sizing import (
    bounds_at,
    highest_allowed,
    lowest_allowed,
    tasks_needed,
    with_size,
)
from control_plane.autoscaler.core.ways import LEARNT_S, WaysState, with_measurement

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
"""Added to the start time: one evaluation, and one measurement."""
START_MAX_S = 3600.0
RISE_S, RISE_ERRORS, RISE_MAX = 120.0, 3.0, 2.0
"""In the first day of a job forecasts have no basis. A load that exceeds its forecast by three mean
errors is extrapolated from this time, up to twice itself (docs/adr/0218)."""
STARTS_KEPT = 8
"""Start times that are kept; the forecast horizon is the longest of them."""


class SizingState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job, besides its history, from one evaluation to the next."""

    learnt: ForecastState = ForecastState()
    sizes: tuple[tuple[float, int], ...] = ()
    """Time and size, for the speed limits: observed sizes of any writer."""
    starts: tuple[float, ...] = ()
    """How long the last increases took until all tasks were healthy, in seconds."""
    growing_since: float = 0.0
    """When the size last rose to tasks that are not healthy yet; 0: all are healthy."""
    grown_from: int = 0
    """The size from which that rise began."""
    observed_at: float = 0.0
    """When the job was last observed. A size that rose since then may have risen at that time."""
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
    """The whole state of one job; `advance` changes it, and returns the recommendation."""

    history: LoadHistory = field(default_factory=LoadHistory)
    state: SizingState = field(default_factory=SizingState)

    def advance(self, policy: Autoscale, job: JobObservation) -> Recommendation:
        """Record an observation, and return the size that the job should have."""
        self._record_sizes(policy, job)
        load = fresh_load(policy, job, self.state.push_seen)
        if self.history.drop_after(job.at):
            self._update(
                predicted=None, learnt=msgspec.structs.replace(self.state.learnt, pending=())
            )
        predicted = self._forecast(policy, job, load)
        predicted = self._forecast_with_rise(policy, job, load, predicted)
        policy, why = self._target_by_latency(policy, job, load)
        per_task = (policy.target or 0.0) * job.capacity
        load_ahead = _larger_of(load, predicted)
        if load is not None and load_ahead is not None and per_task > 0:
            start_s = max(self.state.starts, default=START_S)
            measured = job.at, load, load_ahead
            ways = with_measurement(self.state.ways, policy.quantile, measured, per_task, start_s)
            self._update(ways=ways)
        return recommend(policy, job, load, predicted, self.state, why)

    def _forecast(
        self, policy: Autoscale, job: JobObservation, load: float | None
    ) -> Forecast | None:
        """Add the load to the history; return the forecast, None if there is no recent one."""
        if load is not None:
            slots = math.ceil(horizon_s(policy, self.state.starts) / SLOT_S)
            closed = self.history.add(job.measured_at, load)
            learnt = self.state.learnt
            if closed is not None:
                learnt = learn(self.history, learnt, slots, policy.quantile)
            if closed is not None or self.state.predicted is None:
                predicted = forecast(self.history, learnt, slots)
                self._update(learnt=learnt, predicted=predicted, predicted_for=job.at)
        is_recent = job.at - self.state.predicted_for <= SLOT_S + STALE_S
        return self.state.predicted if is_recent else None

    def _forecast_with_rise(
        self,
        policy: Autoscale,
        job: JobObservation,
        load: float | None,
        predicted: Forecast | None,
    ) -> Forecast | None:
        """Return the forecast, or the line of the last minutes where the load is above it."""
        if load is None or self.state.ways.learnt_s >= LEARNT_S:
            return predicted
        at = job.measured_at
        before = [(t, v) for t, v in self.state.recent if at - RISE_S <= t < at]
        recent = (*before, (at, load))
        self._update(recent=recent)
        slope = slope_of(recent)
        known = math.inf if predicted is None else predicted.expected
        usual = known * math.exp(RISE_ERRORS * self.state.learnt.error)
        if slope is None or slope <= 0 or load <= usual:
            return predicted
        horizon = horizon_s(policy, self.state.starts)
        load_ahead = min(load + slope * horizon, load * RISE_MAX)
        return Forecast(load=load_ahead, expected=load_ahead, by={"rise": 1.0}, horizon_s=horizon)

    def resolved(
        self, policy: Autoscale, now: tuple[float, float] | None = None
    ) -> tuple[Autoscale, str]:
        """Return the policy with the target load that its latency permits, and the reason.

        `now` is the present load of a task and its latency; None: not measured.
        """
        if policy.latency is None:
            return policy, ""
        target, most, why = load_of_task(policy.latency, policy.target, self.state.latency, now)
        return msgspec.structs.replace(policy, target=target, ceiling=most), why

    def _target_by_latency(
        self, policy: Autoscale, job: JobObservation, load: float | None
    ) -> tuple[Autoscale, str]:
        """Learn from the present latency, and return the policy that follows from it."""
        latency, state = fresh_latency(job), self.state
        if policy.latency is None:
            return policy, ""
        pushed = state.push_seen > 0 and job.at - state.push_seen < SETTLE_S
        if load is None or latency is None or job.healthy < 1 or pushed:
            return self.resolved(policy)
        each = load / job.healthy
        steady = job.at - state.sizes[-1][0] >= STEADY_S and not state.growing_since
        steady = steady and job.healthy >= job.tasks
        if steady or latency > policy.latency.limit_s:
            measured = job.latency_at, each, latency
            self._update(latency=with_latency(state.latency, policy.latency, *measured))
        return self.resolved(policy, (each, latency))

    def _update(self, **changes: object) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)

    def _record_sizes(self, policy: Autoscale, job: JobObservation) -> None:
        state = self.state
        before = state.sizes[-1][1] if state.sizes else job.tasks
        since, starts, grown_from = state.growing_since, state.starts, state.grown_from
        if job.tasks > before:  # the newest tasks are healthy last
            began = max(state.observed_at, job.at - STALE_S)
            since, grown_from = min(began, job.at), grown_from if since else before
        if job.tasks < before:  # starting tasks continue the growth
            since = since if job.healthy < job.tasks else 0.0
        elif since and job.healthy >= job.tasks:
            took = min(max(0.0, job.at - since), START_MAX_S)
            starts, since = (*starts, took)[-STARTS_KEPT:], 0.0
        keep_s = max(policy.up.per_s, policy.down.per_s)
        self._update(
            sizes=with_size(state.sizes, job.tasks, job.at, keep_s),
            starts=starts,
            growing_since=since,
            grown_from=grown_from,
            push_seen=job.at if job.push_reason else min(state.push_seen, job.at),
            observed_at=job.at,
        )


def horizon_s(policy: Autoscale, starts: tuple[float, ...]) -> float:
    """Return the seconds that a size must cover: until tasks that are added now are healthy."""
    return policy.horizon_s or max(starts, default=START_S) + MARGIN_S


def fresh_load(policy: Autoscale, job: JobObservation, push_seen: float) -> float | None:
    """Return the load if it is recent and a number, and no update has just started tasks."""
    load = job.load
    if load is None or not math.isfinite(load) or load < 0:
        return None
    if not -STALE_S <= job.at - job.measured_at <= STALE_S:
        return None
    spiked = push_seen > 0 and job.at - push_seen < SETTLE_S
    return None if spiked and policy.signal is not LoadSignal.QUERY else min(load, LARGEST)


def fresh_latency(job: JobObservation) -> float | None:
    """Return the latency if it is recent and a valid time."""
    latency = job.latency
    if latency is None or not math.isfinite(latency) or latency < 0:
        return None
    return latency if abs(job.at - job.latency_at) <= STALE_S else None


def recommend(
    policy: Autoscale,
    job: JobObservation,
    load: float | None,
    predicted: Forecast | None,
    state: SizingState,
    why: str = "",
) -> Recommendation:
    """Return the size for a measured load and its forecast.

    `why` is the reason for the target of the policy; empty: the owner wrote it.
    """
    low, high, schedule = bounds_at(policy, job.at)
    sized_load, followed = _load_to_size_for(job, load, predicted, state)
    if sized_load is None or job.capacity <= 0 or policy.target is None:
        return _held_size(job, low, _missing_reason(policy, job, why))
    size = tasks_needed(policy, sized_load, job.capacity, job.msbs)
    of_load = _load_reason(policy, job, sized_load, load, predicted)
    notes = [why, of_load, followed, f"{size.tasks} tasks needed"]
    if size.tasks > size.at_target:
        reserve = f"plus a reserve for the loss of 1 of {job.msbs} MSBs"
        notes.append(f"{size.at_target} at target, {reserve}")
    bounded = min(max(size.tasks, low), high)
    if bounded != size.tasks:
        when = f" ({schedule} UTC)" if schedule else ""
        notes.append(f"bounds are {low} to {high}{when}")
    held = _hold_reason(policy, job, load, bounded, state) if bounded < job.tasks else ""
    if held:
        tasks = max(job.tasks, low)
        notes.append(f"kept at {tasks}: {held}")
    else:
        tasks, note = _allowed_size(policy, job, bounded, state, (low, high))
        notes.append(note)
    return Recommendation(
        at=job.at,
        tasks=tasks,
        was=job.tasks,
        reason="; ".join(filter(None, notes)),
        wanted=size.tasks,
        held=held,
        load=load,
        forecast=predicted,
        capacity=job.capacity,
    )


def _load_to_size_for(
    job: JobObservation, load: float | None, predicted: Forecast | None, state: SizingState
) -> tuple[float | None, str]:
    """Return the load to size for, and the way that gave it; empty: the forecast."""
    if load is not None and state.ways.at == job.at and (why := state.ways.explained()):
        return max(load, state.ways.load_of(state.ways.cheapest)), why
    return _larger_of(load, predicted), ""


def _allowed_size(
    policy: Autoscale, job: JobObservation, tasks: int, state: SizingState, bounds: tuple[int, int]
) -> tuple[int, str]:
    """Return the size that speed limits and starting tasks allow, and why it is not `tasks`."""
    low, high = bounds
    limited = _speed_limited(policy, job, tasks, state.sizes)
    allowed = min(max(limited, _kept_while_starting(job, tasks, state), low), high)
    if limited != tasks:
        way = policy.up if limited < tasks else policy.down
        return allowed, f"speed limit of {way.share:.0%} in {way.per_s:g} s: {allowed} now"
    if allowed > max(tasks, low):
        return allowed, f"{allowed} tasks stay until others have started"
    return allowed, ""


def _kept_while_starting(job: JobObservation, tasks: int, state: SizingState) -> int:
    """Return the least size while tasks start: those that serve, or that ran before the growth."""
    starting = tasks < job.tasks and job.healthy < job.tasks
    return min(max(job.healthy, state.grown_from), job.tasks) if starting else 0


def _hold_reason(
    policy: Autoscale,
    job: JobObservation,
    load: float | None,
    tasks: int,
    state: SizingState,
) -> str:
    """Return why the size is not reduced now; empty: it may be."""
    if job.push_reason:
        return f"not reduced: {job.push_reason}"
    if load is None:
        return "not reduced: the load is not measured now"
    is_unhealthy = job.healthy < job.tasks
    if is_unhealthy and not (
        state.growing_since and _kept_while_starting(job, tasks, state) < job.tasks
    ):
        return f"not reduced: {job.healthy} of {job.tasks} tasks are healthy"
    if policy.latency is not None and load > 0 and fresh_latency(job) is None:
        why = job.latency_missing or "it is stale or not a time"
        return f"not reduced: the latency is not measured: {why}"
    if job.tasks * (1 - TOLERANCE) <= tasks and job.tasks <= bounds_at(policy, job.at)[1]:
        return f"within {TOLERANCE:.0%} of the present size"
    return ""


def _larger_of(load: float | None, predicted: Forecast | None) -> float | None:
    """Return the larger of both, without a forecast that is no number; None: both are unknown."""
    known = [load, predicted.load if predicted is not None else None]
    return max((v for v in known if v is not None and math.isfinite(v) and v >= 0), default=None)


def _speed_limited(
    policy: Autoscale, job: JobObservation, tasks: int, sizes: tuple[tuple[float, int], ...]
) -> int:
    known = sizes or ((job.at, job.tasks),)
    if tasks > job.tasks:
        return max(job.tasks, min(tasks, highest_allowed(known, policy.up, job.at)))
    if tasks < job.tasks:
        return min(job.tasks, max(tasks, lowest_allowed(known, policy.down, job.at)))
    return tasks


def _held_size(job: JobObservation, low: int, why: str) -> Recommendation:
    tasks = max(job.tasks, low)
    return Recommendation(
        at=job.at,
        tasks=tasks,
        was=job.tasks,
        reason=f"kept at {tasks}: {why}",
        held=why,
        capacity=job.capacity,
    )


def _missing_reason(policy: Autoscale, job: JobObservation, why: str) -> str:
    if job.capacity <= 0:
        return f"the job has no limit to which {policy.signal.value} could be related"
    if job.load is None:
        return job.missing or "the load is not known"
    if policy.target is None:
        return why or "there is no target"
    if not math.isfinite(job.load) or job.load < 0:
        return f"the load is {job.load:g}, which is not valid"
    age = job.at - job.measured_at
    if abs(age) > STALE_S:
        return f"the last measurement is {age:.0f} s old"
    return "tasks are being replaced, and there is no forecast yet"


def _load_reason(
    policy: Autoscale,
    job: JobObservation,
    sized_load: float,
    load: float | None,
    predicted: Forecast | None,
) -> str:
    units = {LoadSignal.CPU: " cores", LoadSignal.MEMORY: " bytes", LoadSignal.NETWORK: " B/s"}
    unit = units.get(policy.signal, "")
    measured = "not measured" if load is None else f"{load:.4g}{unit}"
    load_ahead = ""
    if predicted is not None:
        load_ahead = f", at most {predicted.load:.4g}{unit} within {predicted.horizon_s:g} s"
    each = (policy.target or 0.0) * job.capacity
    return f"load {measured}{load_ahead}: {sized_load:.4g} at {each:.4g}{unit} a task"
