"""Counts how many copies of a task ran at one moment, from each machine's own records.

Each machine records twice a second which tasks have processes (cgroup.events of cgroup-v2.rst),
with its time since boot. No connection to the machine is needed for that.
"""

from __future__ import annotations

from collections.abc import Mapping

WATCH = (
    'cd /sys/fs/cgroup/workload.slice; while :; do read up rest </proc/uptime; echo "$up" '
    '$(grep -l "populated 1" */twine-task-*/cgroup.events) >>/run/watch; sleep 0.5; done'
)
Span = tuple[float, float]


def copies(watched: str, ahead_s: float) -> dict[str, list[Span]]:
    """Return by unit when it had processes, on the test's clock."""
    found: dict[str, list[Span]] = {}
    last: tuple[float, set[str]] | None = None
    for line in watched.splitlines():
        uptime, *paths = line.split()
        now, units = float(uptime) - ahead_s, {path.split("/")[1] for path in paths}
        for unit in units:
            spans = found.setdefault(unit, [])
            if last is not None and unit in last[1]:
                spans[-1] = (spans[-1][0], now)
            else:
                spans.append((now, now))
        last = now, units
    return found


def at_most_at_once(seen: Mapping[str, Mapping[str, list[Span]]], unit: str) -> int:
    """Return the largest number of machines on which a unit had processes at the same moment."""
    spans = [span for units in seen.values() for span in units.get(unit, [])]
    return max((sum(a <= start <= b for a, b in spans) for start, _ in spans), default=0)
