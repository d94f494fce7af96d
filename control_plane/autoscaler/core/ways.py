"""Compares five ways of following a load, and chooses the cheapest one for each job. Pure.

A forecast is best if former days and the last minutes predict the load. Unpredictable bursts cost
less with a factor on the present load. Recurring bursts cost less if the size stays for a while.
Each evaluation computes the size by each way and adds its cost, as `simulate` does. Costs fade, and
the way with the least cost is followed. docs/adr/0204 has the measured costs.
"""

from __future__ import annotations

import msgspec

from control_plane.autoscaler.core.sizing import sizes_in_force, tasks_for, with_size

PENALTY = 10.0
"""Cost of a missing task-minute, in idle task-minutes."""
USUAL_QUANTILE = 0.8
"""At this quantile of a policy the penalty is `PENALTY`; at others it grows with their odds."""
HALF_LIFE_S = 3 * 86_400.0
"""Half-life of a counted cost."""
LEARNT_S = 86_400.0
"""The forecast is used until costs were counted for this long."""
STEP_MAX_S = 300.0
"""The most that one evaluation adds to the costs: after a gap the earlier sizes are unknown."""
START_MAX_S = 1800.0
"""Upper bound of a start time, which bounds how many computed sizes are kept."""


class FollowedWay(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that derives the load to size for from the measured load."""

    name: str
    ahead: bool
    """Use the larger of load and forecast; False: use the load."""
    factor: float = 1.0
    hold_s: float = 0.0
    """Use the largest value of the last `hold_s`."""


WAYS = (
    FollowedWay(name="the forecast", ahead=True),
    FollowedWay(name="the forecast, kept for 10 min", ahead=True, hold_s=600.0),
    FollowedWay(name="the forecast, kept for 30 min", ahead=True, hold_s=1800.0),
    FollowedWay(name="the load, kept for 30 min", ahead=False, hold_s=1800.0),
    FollowedWay(name="the load times 1.35", ahead=False, factor=1.35),
)
_HOLD_S = max(way.hold_s for way in WAYS)
_Peaks = tuple[tuple[float, float], ...]


class WaysState(msgspec.Struct, frozen=True, kw_only=True):
    """The learnt state about the ways of one job."""

    at: float = 0.0
    """When it was evaluated last, in seconds since 1970."""
    learnt_s: float = 0.0
    """Time whose costs were counted, up to `LEARNT_S`."""
    needed: float = 0.0
    """Task-minutes that the load needed; fades as the costs do."""
    costs: tuple[float, ...] = (0.0,) * len(WAYS)
    """By way, in idle task-minutes."""
    loads: _Peaks = ()
    """Time and load of the last `_HOLD_S`, without loads that a later one exceeded."""
    aheads: _Peaks = ()
    """The same for the larger of load and forecast."""
    sizes: tuple[tuple[tuple[float, int], ...], ...] = ((),) * len(WAYS)
    """By way, its sizes and their times, for as long as a task takes to start."""

    @property
    def cheapest(self) -> int:
        """The number of the way to follow."""
        if self.learnt_s < LEARNT_S:
            return 0
        return min(range(len(WAYS)), key=self.costs.__getitem__)

    def load_of(self, number: int) -> float:
        """Return the load that a way sizes for; 0 before the first evaluation."""
        way = WAYS[number]
        peaks = self.aheads if way.ahead else self.loads
        if not way.hold_s:
            return way.factor * peaks[-1][1] if peaks else 0.0
        since = self.at - way.hold_s
        return way.factor * next((value for at, value in peaks if at >= since), 0.0)

    def explained(self) -> str:
        """Return in a sentence which way is followed, and its cost compared to the forecast."""
        chosen = self.cheapest
        if chosen == 0 or self.needed <= 0:
            return ""
        cost, usual = self.costs[chosen] / self.needed, self.costs[0] / self.needed
        return f"by {WAYS[chosen].name}: it cost {cost:.3g} of the load, the forecast {usual:.3g}"


def with_measurement(
    state: WaysState,
    quantile: float,
    measured: tuple[float, float, float],
    per_task: float,
    start_s: float,
) -> WaysState:
    """Return the state after a measurement.

    `measured` has its time, the load, and the larger of load and forecast. `per_task` is the load
    that a task carries, `start_s` the time until a new task is healthy.
    """
    at, load, ahead = measured
    passed_s = min(max(0.0, at - state.at), STEP_MAX_S) if state.at else 0.0
    need, fades = tasks_for(load, per_task), 0.5 ** (passed_s / HALF_LIFE_S)
    start_s = min(start_s, START_MAX_S)
    moved = msgspec.structs.replace(
        state,
        at=at,
        learnt_s=min(state.learnt_s + passed_s, LEARNT_S),
        needed=state.needed * fades + need * passed_s / 60,
        loads=_with_peak(state.loads, at, load),
        aheads=_with_peak(state.aheads, at, ahead),
    )
    sizes = tuple(
        with_size(known, tasks_for(moved.load_of(number), per_task), at, start_s)
        for number, known in enumerate(state.sizes)
    )
    missing, costs = penalty(quantile), []
    for cost, known in zip(state.costs, sizes, strict=True):
        short = max(0, need - min(sizes_in_force(known, start_s, at)))
        now = short * missing + max(0, known[-1][1] - need)
        costs.append(cost * fades + now * passed_s / 60)
    return msgspec.structs.replace(moved, sizes=sizes, costs=tuple(costs))


def penalty(quantile: float) -> float:
    """Return the cost of a missing task-minute in idle ones; it rises with the quantile."""
    usual = USUAL_QUANTILE / (1 - USUAL_QUANTILE)
    return PENALTY * quantile / (1 - quantile) / usual


def _with_peak(peaks: _Peaks, at: float, value: float) -> _Peaks:
    """Return the peaks with a new value; after the clock was set back, later peaks count as new."""
    since = at - _HOLD_S
    return (*((min(t, at), v) for t, v in peaks if t >= since and v > value), (at, value))
