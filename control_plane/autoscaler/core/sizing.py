"""Computes how many tasks a load needs, and how fast a size may change. Pure arithmetic.

Sizes are rounded up, but less than a millionth of a task adds none.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

import msgspec

from control_plane.api.autoscale import Autoscale, Headroom, ScheduledBounds, SpeedLimit, Weekday

SECONDS_OF_DAY = 86_400
_LARGEST = 1_000_000_000
"""Upper bound of a computed size; the policy's maximum is far below."""


class NeededTasks(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tasks that a load needs."""

    tasks: int
    at_target: int
    """Without headroom."""


def tasks_for(load: float, per_task: float) -> int:
    """Return the fewest tasks that carry a load, at most `_LARGEST`.

    `per_task` is 0 if a tiny target was multiplied by a small limit.
    """
    quotient = load / per_task if per_task > 0 else math.inf
    if not math.isfinite(quotient) or quotient > _LARGEST:
        return _LARGEST
    return max(0, math.ceil(quotient - 1e-6))


def tasks_for_survivors(survivors: int, msbs: int) -> int:
    """Return the fewest tasks that leave `survivors` after the loss of one MSB.

    Tasks are spread evenly: an MSB has at most ceil(tasks / msbs). With one MSB no size leaves any,
    so `survivors` is returned.
    """
    return survivors if msbs < 2 else survivors + math.ceil(survivors / (msbs - 1))


def tasks_needed(policy: Autoscale, load: float, capacity: float, msbs: int) -> NeededTasks:
    """Return the tasks that carry a load at the target, and at the ceiling after an MSB is lost.

    `capacity` is the load of one task at target 1: its cores, its bytes, or 1 for a query. The
    policy must have a target.
    """
    assert policy.target is not None
    at_target = tasks_for(load, policy.target * capacity)
    if policy.headroom is Headroom.NONE or msbs < 2:
        return NeededTasks(tasks=at_target, at_target=at_target)
    survivors = tasks_for(load, (policy.ceiling or policy.target) * capacity)
    tasks = max(at_target, tasks_for_survivors(survivors, msbs))
    return NeededTasks(tasks=tasks, at_target=at_target)


def bounds_at(policy: Autoscale, now: float) -> tuple[int, int, str]:
    """Return the fewest and the most tasks at a time, and the schedule entries that apply."""
    low, high, applied = policy.minimum, policy.maximum, []
    day, second = divmod(int(now), SECONDS_OF_DAY)
    for entry in policy.schedule:
        start, end = _second_of_day(entry.start), _second_of_day(entry.end)
        begun = day
        if start < end:
            applies = start <= second < end
        else:
            applies = second >= start or second < end
            begun = day if second >= start else day - 1
        if not applies or not _applies_on_day(entry, begun):
            continue
        applied.append(f"{entry.start} to {entry.end}")
        low = max(low, entry.minimum or 0)
        high = min(high, high if entry.maximum is None else entry.maximum)
    return low, max(low, high), ", ".join(applied)


def _applies_on_day(entry: ScheduledBounds, day: int) -> bool:
    """Return whether an entry applies on a day, given by its number since 1970."""
    today = datetime.date(1970, 1, 1) + datetime.timedelta(days=day)
    weekday, date = list(Weekday)[today.weekday()], today.isoformat()
    if weekday in entry.days or date in entry.dates or date[5:] in entry.dates:
        return True
    return not entry.days and not entry.dates


def _second_of_day(time_of_day: str) -> int:
    hours, _, minutes = time_of_day.partition(":")
    return int(hours) * 3600 + int(minutes) * 60


def highest_allowed(sizes: Sequence[tuple[float, int]], limit: SpeedLimit, now: float) -> int:
    """Return the largest size that the limit allows, after these sizes (time, tasks; in order)."""
    base = min(sizes_in_force(sizes, limit.per_s, now))
    return max(base + 1, math.floor(base * (1 + limit.share) + 1e-6))


def lowest_allowed(sizes: Sequence[tuple[float, int]], limit: SpeedLimit, now: float) -> int:
    """Return the smallest size that the limit allows, after these sizes (time, tasks; in order)."""
    base = max(sizes_in_force(sizes, limit.per_s, now))
    return max(0, min(base - 1, math.ceil(base * (1 - limit.share) - 1e-6)))


def sizes_in_force(sizes: Sequence[tuple[float, int]], per_s: float, now: float) -> list[int]:
    """Return the sizes that were in force within the time before now."""
    begin = now - per_s
    before = [tasks for at, tasks in sizes if at <= begin]
    return [*before[-1:], *(tasks for at, tasks in sizes if at > begin)]


def with_size(
    sizes: tuple[tuple[float, int], ...], tasks: int, now: float, keep_s: float
) -> tuple[tuple[float, int], ...]:
    """Return the sizes with the present one, without those that ended more than `keep_s` ago.

    After the clock was set back, all earlier sizes count as recent.
    """
    if sizes and sizes[-1][0] > now:
        sizes = tuple((min(at, now), size) for at, size in sizes)
    if not sizes or sizes[-1][1] != tasks:
        sizes = (*sizes, (now, tasks))
    begin = now - keep_s
    ended = sum(1 for at, _ in sizes[1:] if at <= begin)
    return sizes[ended:]
