"""What limits one scheduler shard: how many machines take a whole core, and how much memory?

    python -m tests.bench.shard_limit [--sizes 2500 5000 10000] [--tasks 10] [--events 10] [--json]

Runs the bench of one scheduler (`scheduler.py`) at each size, with `--tasks` on each machine and a
job for every 25 tasks, and fits lines to the idle share of a core, the memory, and the CPU time
until all machines report to a successor. `machines_at_one_core` is the size where the idle share
and `--events` of each machine in an hour take one core together. `gib_there` and
`takeover_cpu_s_there` are the memory and that CPU time at this size. `growth` is the idle CPU time
for each machine at the largest size over that at the smallest: above 1 the lines are too
optimistic. A scheduler is one thread of one process, so only more shards raise the limit, not more
cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_JOB_TASKS = 25


def main() -> None:
    """Measure, and print one JSON line or one line for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2500, 5000, 10_000])
    parser.add_argument("--tasks", type=int, default=10, help="of each machine")
    parser.add_argument("--events", type=float, default=10.0, help="of each machine in an hour")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    points = [measured(size, given.tasks) for size in given.sizes]
    found: dict[str, float] = {}
    for point in points:
        of = int(point["machines"])
        found |= {f"{name}_{of}": point[name] for name in ("idle_percent", "rss_mb", "event_ms")}
    found |= limit(points, given.events)
    if given.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:24} {value:g}" for name, value in found.items()))


def measured(machines: int, tasks: int) -> Mapping[str, Any]:
    """Return the figures of one scheduler with this number of machines, from a separate process."""
    each = ("--machines", machines, "--tasks", machines * tasks)
    jobs = ("--jobs", machines * tasks // _JOB_TASKS)
    line = [sys.executable, "-m", "tests.bench.scheduler", "--one", "--json"]
    answer = subprocess.run(
        [*line, *map(str, (*each, *jobs))], stdout=subprocess.PIPE, check=True, text=True
    )
    figures: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return figures


def limit(points: Sequence[Mapping[str, float]], events: float) -> dict[str, float]:
    """Return the limit of one shard, from its figures at two sizes or more.

    `events` are those of one machine in an hour; the cost of one event is the largest of all sizes.
    """
    sizes = [point["machines"] for point in points]
    fixed, each = line(sizes, [point["idle_percent"] / 100 for point in points])
    event_s = max(point["event_ms"] for point in points) / 1000
    machines = (1.0 - fixed) / (each + events / 3600 * event_s)
    memory = line(sizes, [point["rss_mb"] for point in points])
    takeover = line(sizes, [point["start_cpu_s"] for point in points])
    ordered = sorted(points, key=lambda point: point["machines"])
    first, last = (of["idle_percent"] / of["machines"] for of in (ordered[0], ordered[-1]))
    return {
        "machines_at_one_core": round(machines),
        "gib_there": round((memory[0] + memory[1] * machines) / 1024, 1),
        "takeover_cpu_s_there": round(takeover[0] + takeover[1] * machines),
        "growth": round(last / first, 2),
    }


def line(at: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the intercept and the slope of the least-squares line."""
    x, y = sum(at) / len(at), sum(values) / len(values)
    pairs = zip(at, values, strict=True)
    slope = sum((a - x) * (v - y) for a, v in pairs) / sum((a - x) ** 2 for a in at)
    return y - slope * x, slope


if __name__ == "__main__":
    main()
