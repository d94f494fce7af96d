"""What do sizes cost that follow a load: ours beside HPA's rule, and how fast are they computed?

    python -m tests.bench.autoscale [--json] [--jobs 10000] [--only TRACE]

Each rule is replayed minute by minute over eight real traces (tests/bench/data) and three made-up
ones; a new task is healthy after 300 s. Cost is in task-minutes: missing ones times 10 and idle
ones, over the sum of the load. The first day is not counted. Every rule but ours has a factor by
which it multiplies the load that it expects, and gets the one that is best for it in sum over all
traces; ours has its default quantile on all of them. With statsmodels installed (it is in no
extra: it brings pandas and SciPy) Holt and Winters' method is compared, too.

Then 10,000 jobs with a full history are evaluated once: the share of a core at one evaluation a
minute, with the memory that they take.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, LoadSignal, SpeedLimit
from control_plane.autoscaler.core.history import SLOT_S, LoadHistory
from control_plane.autoscaler.core.recommendation import JobObservation, JobSizing
from control_plane.autoscaler.core.replay import replay, rule_of
from tests.bench.autoscale_rules import (
    DAY_S,
    Make,
    Points,
    diurnal,
    generated,
    hpa,
    last_week,
    library,
    naive,
    traces,
)

FACTORS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5)
OURS = Autoscale(
    minimum=1,
    maximum=15_000,
    target=1.0,
    mode=AutoscaleMode.APPLY,
    signal=LoadSignal.QUERY,
    query="load",
    headroom=Headroom.NONE,
    horizon_s=420.0,
    up=SpeedLimit(share=1.0, per_s=60.0),
    down=SpeedLimit(share=0.2, per_s=300.0),
)


def cost(points: Points, rule: object) -> float:
    """Return the cost of a rule as a share of the load."""
    begin = points[0][0] + DAY_S
    found, minutes = replay(points, rule, 1.0, counted_from=begin)  # type: ignore[arg-type]
    return found.cost / sum(m.load for m in minutes)


def table(every: dict[str, Points]) -> dict[str, dict[str, float]]:
    """Return the cost by rule and trace, each rule with its best factor."""
    makes: dict[str, Make] = {"naive": naive, "last week": last_week, "hpa": hpa}
    if (holt := library()) is not None:
        makes["holt-winters"] = holt
    found = {"ours": {name: cost(p, rule_of(OURS, 1.0)) for name, p in every.items()}}
    for name, make in makes.items():
        by = {f: {t: cost(p, make(f)) for t, p in every.items()} for f in FACTORS}
        best = min(FACTORS, key=lambda f: sum(by[f].values()))
        found[f"{name} x{best:g}"] = by[best]
    return found


def speed(jobs: int) -> dict[str, float]:
    """Return the share of a core, and the memory, of jobs with a full history."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed = LoadHistory()
    for at, load in diurnal(56, 0.05, 1):
        seed.add(at, load)
    data, newest = seed.to_bytes(), seed.slot * SLOT_S
    fleet = [JobSizing(LoadHistory.from_bytes(data)) for _ in range(jobs)]
    began = time.process_time()
    for minute in range(1, 6):  # five minutes: each job closes a slot once
        at = newest + 60.0 * minute
        for sizing in fleet:
            seen = JobObservation(
                at=at, tasks=80, healthy=80, capacity=1.0, load=75.0, measured_at=at, msbs=6
            )
            sizing.advance(OURS, seen)
    took = time.process_time() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "share of a core": round(took / 300.0 * 10_000 / jobs, 4),
        "ms per evaluation": round(took / 5 / jobs * 1000, 4),
        "MB of 10,000 jobs": round((after - before) / 1024 * 10_000 / jobs, 1),
        "bytes of a history": len(data),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    figures: dict[str, object] = dict(speed(args.jobs))
    every = {**traces(), **generated()}
    if args.only:
        every = {name: points for name, points in every.items() if name == args.only}
    costs = table(every)
    names = list(every)
    print(f"{'rule':20}" + "".join(f"{n[:13]:>14}" for n in [*names, "sum"]))
    for rule, by in costs.items():
        row = [by[n] for n in names]
        print(f"{rule:20}" + "".join(f"{v:14.3f}" for v in [*row, sum(row)]))
        figures[f"cost {rule}"] = round(sum(row), 3)
    best = {n: min(by[n] for by in costs.values()) for n in names}
    figures["ours over the best, worst trace"] = round(
        max(costs["ours"][n] / best[n] for n in names), 3
    )
    others = min(sum(by.values()) for rule, by in costs.items() if rule != "ours")
    figures["ours over the best other, in sum"] = round(sum(costs["ours"].values()) / others, 3)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
