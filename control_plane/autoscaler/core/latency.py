"""Learns the load of one task at which its latency reaches the limit, from a job's history. Pure.

Latency is stored by load of a task, in bins that are 10 % wide. Each bin has mean and variance of
the logarithm of latency, which fade. Bins below the learnt load are within the limit, bins above it
are over the limit. If all bins are within it, the line of 1/latency is extended a little beyond
them. That line is straight for a queue with one server, and falls faster with several.
docs/adr/0217 has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from control_plane.api.autoscale import LatencyTarget

_WIDTH, _LARGEST = math.log(1.1), 1e15
BINS_MAX = 32
"""They cover loads up to a factor of 21. A further bin replaces the one of least weight."""
KNOWN_MIN = 5.0
"""The least minutes of measurements of a bin that counts."""
LEARNT_MIN = 30.0
"""The least minutes of measurements, of all bins together, before a load is learnt."""
WEIGHT_MAX_MIN = 60.0
"""Upper bound of a bin's weight, in minutes. With it, half of a change is learnt in 40 minutes."""
HALF_LIFE_S = 7 * 86_400.0
"""Half-life of a measured minute. Last week's peaks count, those of two months ago do not."""
OVER_HALF_LIFE_S = 6 * 3600.0
"""Half-life for a bin over the limit: its load is avoided, so no measurement would correct it."""
VARIANCE_MAX = 0.25
"""`OVER_HALF_LIFE_S` also applies above this variance, a factor of 1.6 around the mean: such a bin
mixes periods."""
STEP_MAX_S = 300.0
"""The longest time that one measurement stands for: the time before a gap is unknown."""
BEYOND = 1.35
"""The learnt load is at most this much beyond the largest measured one. With a share of 0.8 the
load of a task rises by 8 % until that is measured, too."""
CONTRADICTED = 0.95
"""Share of its weight that a bin keeps for each minute that contradicts it: a new version may be
slower."""
INCIDENT_S = 3 * 3600.0
"""Time in which the learnt load falls by at most half: the cause may be a slow database."""
FLAT, FLAT_SPAN = 0.8, 1.9
"""Load is not the cause of a latency if `1 / FLAT_SPAN` of it already causes this share of it."""


class LatencyBin(msgspec.Struct, frozen=True, array_like=True):
    """Latency at one load of a task."""

    number: int
    minutes: float
    mean: float
    """Of the logarithm of seconds, as is the variance."""
    variance: float

    @property
    def load(self) -> float:
        """The load in the middle of the bin."""
        return math.exp((self.number + 0.5) * _WIDTH)

    @property
    def latency_s(self) -> float:
        """The latency that five of six measurements do not exceed."""
        return math.exp(self.mean + math.sqrt(self.variance))


class LearntLatency(msgspec.Struct, frozen=True, kw_only=True):
    """The learnt state about the latency of one job."""

    query: str = ""
    """The query that measured it: with another query it begins again."""
    at: float = 0.0
    """Of the newest measurement, in seconds since 1970."""
    bins: tuple[LatencyBin, ...] = ()
    within_at: float = 0.0
    """When `within` was last set: at a latency within the limit, or after `INCIDENT_S` above it."""
    within: float | None = None
    """The learnt load of a task at the limit, as of `within_at`."""

    @property
    def known(self) -> list[LatencyBin]:
        """The bins with enough measurements, by load."""
        return sorted((b for b in self.bins if b.minutes >= KNOWN_MIN), key=lambda b: b.number)


def with_latency(
    state: LearntLatency, target: LatencyTarget, at: float, load: float, latency_s: float
) -> LearntLatency:
    """Return the state after a measurement, at a load of each task."""
    query, limit_s = target.query, target.limit_s
    if state.query != query:
        state = LearntLatency(query=query)
    if not (load > 0 and latency_s > 0):
        return msgspec.structs.replace(state, at=at)
    passed_s = max(0.0, at - state.at) if state.at else 60.0
    minutes = min(passed_s, STEP_MAX_S) / 60
    load, latency_s = min(load, _LARGEST), min(latency_s, _LARGEST)
    number, value = math.floor(math.log(load) / _WIDTH), math.log(latency_s)
    by = {b.number: _faded(b, passed_s, limit_s) for b in state.bins}
    for other in [
        b for b in by.values() if _is_contradicted(b, number, limit_s, latency_s > limit_s)
    ]:
        by[other.number] = msgspec.structs.replace(
            other, minutes=other.minutes * CONTRADICTED**minutes
        )
    old = by.pop(number, LatencyBin(number, 0.0, value, 0.0))
    weight = min(old.minutes + minutes, WEIGHT_MAX_MIN)
    share, off = minutes / weight if weight else 0.0, value - old.mean
    mean, variance = old.mean + share * off, (1 - share) * (old.variance + share * off * off)
    kept = sorted(by.values(), key=lambda b: -b.minutes)[: BINS_MAX - 1]
    bins = (*kept, LatencyBin(number, weight, mean, variance))
    if latency_s <= limit_s or not 0 <= at - state.within_at < INCIDENT_S:
        found = LearntLatency(query=query, at=at, bins=bins, within_at=at)
        return msgspec.structs.replace(found, within=load_at_limit(found, limit_s))
    return msgspec.structs.replace(state, at=at, bins=bins)


def _faded(bin_: LatencyBin, passed_s: float, limit_s: float) -> LatencyBin:
    is_unsure = bin_.latency_s > limit_s or bin_.variance > VARIANCE_MAX
    half_life_s = OVER_HALF_LIFE_S if is_unsure else HALF_LIFE_S
    return msgspec.structs.replace(bin_, minutes=bin_.minutes * 0.5 ** (passed_s / half_life_s))


def _is_contradicted(bin_: LatencyBin, number: int, limit_s: float, is_over: bool) -> bool:
    """Return whether a measurement in bin `number` contradicts another bin: load adds latency.

    If the measurement is over the limit, larger loads cannot be within it. If it is within the
    limit, smaller loads cannot be over it.
    """
    if is_over:
        return bin_.number > number and bin_.latency_s <= limit_s
    return bin_.number < number and bin_.latency_s > limit_s


def load_at_limit(state: LearntLatency, limit_s: float) -> float | None:
    """Return the load of a task at which its latency reaches the limit; None: not known yet."""
    bins = state.known
    if len(bins) < 2 or sum(b.minutes for b in bins) < LEARNT_MIN:
        return None
    split, limit = _bins_within(bins, limit_s), 1 / limit_s
    if split == 0:
        doubled_load = next((b for b in bins if b.load >= FLAT_SPAN * bins[0].load), None)
        if doubled_load is not None and bins[0].latency_s > FLAT * doubled_load.latency_s:
            return doubled_load.load  # more tasks do not help
        return bins[0].load / BEYOND
    if split < len(bins):
        return _crossing(bins[split - 1], bins[split], limit)
    most = bins[-1].load * BEYOND
    before = bins[max(0, split - 4)]
    fell = 1 / before.latency_s - 1 / bins[-1].latency_s
    return min(most, _crossing(before, bins[-1], limit)) if fell > 0 else most


def _bins_within(bins: Sequence[LatencyBin], limit_s: float) -> int:
    """Return how many bins are below the load at the limit.

    The split leaves the fewest minutes on the wrong side. So an hour with a slow database, at a low
    load, is an exception and not the limit.
    """
    found, wrong = 0, sum(b.minutes for b in bins if b.latency_s <= limit_s)
    least = wrong
    for number, bin_ in enumerate(bins, 1):
        wrong += -bin_.minutes if bin_.latency_s <= limit_s else bin_.minutes
        if wrong < least:
            found, least = number, wrong
    return found


def _crossing(lower: LatencyBin, upper: LatencyBin, limit: float) -> float:
    """Return where the line of 1/latency through two bins has the value `limit`."""
    left, right = 1 / lower.latency_s, 1 / upper.latency_s
    return lower.load + (upper.load - lower.load) * (left - limit) / (left - right)


def load_of_task(
    target: LatencyTarget,
    owner_target: float | None,
    state: LearntLatency,
    now: tuple[float, float] | None,
) -> tuple[float | None, float | None, str]:
    """Return the load that a task should have, the most that it carries, and the reason.

    `owner_target` is the target in the job file. `now` has the present load of a task and its
    latency; None: not measured. While the latency is over the limit, the present load of a task is
    too much. Below half of the load that it carried before, other causes are more likely, so that
    half is the least load.
    """
    state = state if state.query == target.query else LearntLatency()
    limit, most = target.limit_s, load_at_limit(state, target.limit_s)
    least = (state.within or 0.0) / 2
    if most is not None:
        most = max(most, least)
        minutes = sum(b.minutes for b in state.known)
        why = f"a task carries {most:.4g} within {limit:g} s, learnt from {minutes:.0f} min"
    elif owner_target is not None:
        most, why = (
            owner_target / target.share,
            f"target {owner_target:g} until the load that keeps {limit:g} s is learnt",
        )
    else:
        seen = sum(b.minutes for b in state.bins)
        why = f"which load a task carries within {limit:g} s is not learnt yet: {seen:.0f} min of "
        why += f"{LEARNT_MIN:g} at two loads that differ by a tenth; a target says what to assume"
    tasks_help = most is None or any(b.latency_s <= limit for b in state.known)
    if now is not None and now[1] > limit and now[0] > 0 and tasks_help:
        most = now[0] if most is None else min(most, max(now[0], least))
        why = f"latency is {now[1]:.3g} s, over {limit:g} s, at {now[0]:.4g} a task; {why}"
    return (None if most is None else target.share * most), most, why
