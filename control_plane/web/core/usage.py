"""Use of tasks over time: readings of agents, kept while a page is open and drawn as lines."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agent.usage import TaskUsage, Usages
from wire.units import about_size

MACHINES_MAX, READINGS_MAX = 256, 240
"""Machines whose readings are kept, and readings of each: 20 minutes of one in 5 s."""
_UNIT = re.compile(r"(?<=\d)(?=[A-Z])")
_GAP_S = 60.0
"""Two readings further apart are not joined by a line: no page was open in between."""


@dataclass(frozen=True, slots=True)
class Point:
    """Use at one moment; rates are means since the reading before."""

    at: float
    """Seconds since 1970."""
    cores: float
    memory_bytes: float
    network_mbps: float
    waits: float
    """Percent of the last 10 s in which a process waited for CPU."""


class UsageHistory:
    """The last readings of machines with an open page."""

    def __init__(self) -> None:
        self._by_machine: OrderedDict[str, deque[tuple[float, Usages]]] = OrderedDict()

    def add(self, machine: str, at: float, usages: Usages) -> None:
        """Keep a reading; the same one again changes nothing."""
        kept = self._by_machine.setdefault(machine, deque(maxlen=READINGS_MAX))
        self._by_machine.move_to_end(machine)
        if not kept or kept[-1][1].at_boot_s != usages.at_boot_s:
            kept.append((at, usages))
        while len(self._by_machine) > MACHINES_MAX:
            self._by_machine.popitem(last=False)

    def points(self, machine: str, task: str = "") -> list[Point]:
        """Return the use of one task, or of all tasks of a machine together, by time."""
        readings = list(self._by_machine.get(machine, ()))
        found = []
        for (begin, before), (at, after) in pairwise(readings):
            passed_s = after.at_boot_s - before.at_boot_s
            if passed_s <= 0 or at - begin > _GAP_S:
                continue
            old = {one.task_id: one for one in before.tasks}
            now = [one for one in after.tasks if not task or one.task_id == task]
            pairs = [(old[one.task_id], one) for one in now if one.task_id in old]
            if now:
                found.append(_point(at, passed_s, now, pairs))
        return found


def _point(
    at: float,
    passed_s: float,
    now: Sequence[TaskUsage],
    pairs: Sequence[tuple[TaskUsage, TaskUsage]],
) -> Point:
    cores = sum(max(0.0, new.cpu_s - old.cpu_s) for old, new in pairs) / passed_s
    sent = sum(max(0, (new.network_bytes or 0) - (old.network_bytes or 0)) for old, new in pairs)
    return Point(
        at,
        cores,
        float(sum(one.memory_bytes for one in now)),
        sent * 8 / 1e6 / passed_s,
        100 * max(one.cpu_pressure for one in now),
    )


@dataclass(frozen=True, slots=True)
class LineChart:
    """One quantity over time: coordinates in a box of 600 by 100."""

    title: str
    now: str
    top: str
    """The value at the upper edge."""
    line: str
    """Points of an SVG polyline."""
    area: str
    begin: float
    end: float


def usage_charts(points: Sequence[Point], size: Callable[[float], str]) -> list[LineChart]:
    """Return charts of CPU, memory, network and pressure; none for fewer than two points."""
    if len(points) < 2:
        return []
    kinds: list[tuple[str, Callable[[Point], float], Callable[[float], str], float]] = [
        ("CPU", lambda p: p.cores, lambda v: f"{v:.2f} cores", 0.1),
        ("Memory", lambda p: p.memory_bytes, size, float(1 << 20)),
        ("Network", lambda p: p.network_mbps, lambda v: f"{v:.1f} Mbit/s", 1.0),
        ("Waits for CPU", lambda p: p.waits, lambda v: f"{v:.0f} % of the time", 10.0),
    ]
    return [
        line_chart(title, [(point.at, value(point)) for point in points], text_of, least)
        for title, value, text_of, least in kinds
    ]


def line_chart(
    title: str,
    points: Sequence[tuple[float, float]],
    text_of: Callable[[float], str],
    least: float,
) -> LineChart:
    """Return a chart of at least one time and value; its upper edge is at least `least`."""
    begin, end = points[0][0], points[-1][0]
    top = 1.1 * max(least, *(value for _, value in points))
    span = max(end - begin, 1e-9)
    drawn = [
        (round(600 * (at - begin) / span, 1), round(100 - 100 * value / top, 1))
        for at, value in points
    ]
    line = " ".join(f"{x},{y}" for x, y in drawn)
    area = f"0,100 {line} 600,100"
    return LineChart(title, text_of(points[-1][1]), text_of(top), line, area, begin, end)


def about_size_of(value: float) -> str:
    """Return a number of bytes with its unit, for display: `11.8 MiB`."""
    return _UNIT.sub("\u202f", about_size(int(value)))
