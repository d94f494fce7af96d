"""Replays a load under a sizing rule, and sums its cost. Pure.

Cost is in task-minutes: missing ones, times a penalty, plus idle ones.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from control_plane.api.autoscale import Autoscale
from control_plane.api.sizings import ReplayCost, Simulation
from control_plane.autoscaler.core.observing import JobObservation
from control_plane.autoscaler.core.recommendation import START_S, JobSizing
from control_plane.autoscaler.core.sizing import SECONDS_OF_DAY, tasks_for
from control_plane.autoscaler.core.ways import PENALTY

STEP_S = 60.0
GAP_S = 3600.0
"""Between points that are further apart the load is unknown."""
Rule = Callable[[float, float | None, int, int], int]
"""Takes the time, the load (None: unknown), the size and the healthy tasks; returns a size."""


class ReplayedMinute(msgspec.Struct, frozen=True, kw_only=True):
    """One minute of a replay."""

    at: float
    load: float
    needed: int
    size: int
    healthy: int


def replay(
    points: Sequence[tuple[float, float]],
    rule: Rule,
    per_task: float,
    start_s: float = 300.0,
    counted_from: float = 0.0,
) -> tuple[ReplayCost, list[ReplayedMinute]]:
    """Return the cost of a rule over a load (time, load; in order), and its minutes.

    `per_task` is the load that a task carries; a new task is healthy after `start_s`. Minutes
    before `counted_from` cost nothing: the rule learns in them.
    """
    if not points:
        return ReplayCost(), []
    size = healthy = max(1, tasks_for(points[0][1], per_task))
    starting: deque[tuple[float, int]] = deque()
    minutes, changes, before = [], 0, size
    for at, load in _each_minute(points):
        while starting and starting[0][0] <= at:
            healthy += starting.popleft()[1]
        wanted = max(0, rule(at, load, size, healthy))
        if wanted > size:
            starting.append((at + start_s, wanted - size))
        removed = max(0, size - wanted)
        while removed and starting:  # starting tasks go first
            ready, count = starting.pop()
            if count > removed:
                starting.append((ready, count - removed))
            removed -= min(count, removed)
        healthy -= removed
        size = wanted
        if load is None or at < counted_from:
            before = size
            continue
        changes, before = changes + (size != before), size
        need = tasks_for(load, per_task)
        minute = ReplayedMinute(at=at, load=load, needed=need, size=size, healthy=healthy)
        minutes.append(minute)
    return _cost(minutes, changes), minutes


def _cost(minutes: Sequence[ReplayedMinute], changes: int) -> ReplayCost:
    if not minutes:
        return ReplayCost()
    missing = float(sum(max(0, m.needed - m.healthy) for m in minutes))
    idle = float(sum(max(0, m.size - m.needed) for m in minutes))
    return ReplayCost(
        minutes=len(minutes),
        missing=missing,
        idle=idle,
        cost=missing * PENALTY + idle,
        short_minutes=sum(1 for m in minutes if m.healthy < m.needed),
        changes=changes,
        mean_size=sum(m.size for m in minutes) / len(minutes),
        peak_size=max(m.size for m in minutes),
    )


def _each_minute(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float | None]]:
    """Yield the load of each minute, on the line between two points; None in a gap."""
    times = [at for at, _ in points]
    steps = math.floor((times[-1] - times[0]) / STEP_S)
    for step in range(steps + 1):
        at = times[0] + step * STEP_S
        i = min(bisect.bisect_right(times, at), len(points) - 1)
        (t0, v0), (t1, v1) = points[max(0, i - 1)], points[i]
        if t1 - t0 > GAP_S:
            yield at, None
        else:
            yield at, v0 if t1 == t0 else v0 + (v1 - v0) * min(1.0, (at - t0) / (t1 - t0))


def rule_of(policy: Autoscale, capacity: float, msbs: int = 0) -> Rule:
    """Return the rule of a policy, which begins with an empty history."""
    sizing = JobSizing()

    def rule(at: float, load: float | None, size: int, healthy: int) -> int:
        seen = JobObservation(
            at=at,
            tasks=size,
            healthy=healthy,
            capacity=capacity,
            load=load,
            measured_at=at,
            msbs=msbs,
        )
        return sizing.advance(policy, seen).tasks

    return rule


def simulate(
    name: str,
    points: Sequence[tuple[float, float]],
    policies: tuple[Autoscale, Autoscale],
    capacity: float,
    msbs: int,
    starts: Sequence[float],
) -> Simulation:
    """Return what two policies cost over a load: a job's own one and another; both have a target.

    The need follows from the job's own target. Updates, refusals and missing room are not replayed.
    """
    own, other = policies
    per_task, start_s = (own.target or 0.0) * capacity, max(starts, default=START_S)
    costs, days = [ReplayCost()] * 3, 0.0
    if points and per_task > 0:
        peak = max(tasks_for(load, per_task) for _, load in points)
        rules = rule_of(own, capacity, msbs), rule_of(other, capacity, msbs), lambda *_: peak
        costs = [replay(points, rule, per_task, start_s)[0] for rule in rules]
        days = (points[-1][0] - points[0][0]) / SECONDS_OF_DAY
    return Simulation(
        job=name, days=days, start_s=start_s, own=costs[0], other=costs[1], fixed=costs[2]
    )
