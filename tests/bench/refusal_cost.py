"""What does a refusal cost, from 10,000 to a million machines, in each state without room?

    python -m tests.bench.refusal_cost [--json] [--machines 1000000]

All machines are in racks of 36 in 12 MSBs. New jobs of 36 tasks each request a little less than the
one before, so that no answer comes from a cache. The bench measures the CPU time of a plan with its
reasons: `first`, the first request after the region was made, and `next`, the median of the 20 that
follow. States: `power` (budgets of the data centers are used up, machines are held), `waits` (free
machines are kept for a job of higher priority), `too_large` (each task is larger than each
machine), `full` (each machine has no CPU and no memory left), and `little` (each has a little left,
and less than a task needs). `busy` is `little` while tasks of others start and end between the
requests. `…_growth` is the time at the largest size over that at the smallest (goal: 3).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator

from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import fits_each, judge
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.broker.core.assignment import FREE
from tests.bench.preference_cost import GIB, POOL, TASKS, region

STATES = ("power", "waits", "too_large", "full", "little", "busy")
SIZES = (10_000, 100_000, 1_000_000)
NEXT = 20
DEMAND = Demand(memory_bytes=GIB, cpus=1.0)
"""Demand of the job of higher priority, which waits."""
KEEPING = Allowance(
    refuses=lambda machine: "kept" if not judge(DEMAND, machine, machine) else "",
    refuses_all=lambda bucket: "kept" if fits_each(DEMAND, bucket) else "",
)
HELD = {
    "full": Demand(memory_bytes=32 * GIB, cpus=16.0),
    "little": Demand(memory_bytes=26 * GIB, cpus=12.0),
    "busy": Demand(memory_bytes=26 * GIB, cpus=12.0),
}
"""Use of each machine by others, of 32 GiB and 16 CPUs."""


def in_state(machines: int, state: str) -> RegionIndex:
    """Return a region of `machines` machines in a state."""
    pool = FREE if state == "waits" else POOL
    index = region(machines, "no_power" if state == "power" else "room", pool)
    if state in HELD:
        held = enumerate(index.machines.values())
        index.restore("others", POOL, [Claim(n, m, HELD[state]) for n, m in held])
    return index


def asks_ms(index: RegionIndex, state: str) -> Iterator[float]:
    """Yield the CPU time of each request in milliseconds."""
    most = 64 * GIB if state == "too_large" else 8 * GIB
    for number in range(NEXT + 1):
        demand = Demand(
            memory_bytes=most - number * GIB // 16, cpus=4.0 if state == "power" else 4.5
        )
        request = Request(f"new-{number}", POOL, (Group(demand, tuple(range(TASKS))),))
        began = time.process_time()
        made = plan(index, request, KEEPING if state == "waits" else Allowance(machines=0))
        yield (time.process_time() - began) * 1e3
        assert len(made.unplaced) == TASKS, state
        if state == "busy":
            _place_and_remove(index, number)


def _place_and_remove(index: RegionIndex, number: int) -> None:
    """Add a job of 36 small tasks, and remove the one before it."""
    small = Group(Demand(memory_bytes=GIB // 2, cpus=0.5), tuple(range(TASKS)))
    for name, groups in ((f"small-{number}", (small,)), (f"small-{number - 1}", ())):
        made = plan(index, Request(name, POOL, groups), Allowance(machines=0))
        assert not made.unplaced
        assert index.reserve(made.change) == ()
        index.settle(made.change)


def measured(sizes: list[int]) -> dict[str, float]:
    """Return all figures."""
    found: dict[str, float] = {}
    for state in STATES:
        for size in sizes:
            index = in_state(size, state)
            gc.collect()
            gc.freeze()
            first, *following = asks_ms(index, state)
            found[f"{state}_first_ms_{size}"] = first
            found[f"{state}_next_ms_{size}"] = statistics.median(following)
            del index
            gc.unfreeze()
        for kind in ("first", "next"):
            least, most = (found[f"{state}_{kind}_ms_{size}"] for size in (sizes[0], sizes[-1]))
            found[f"{state}_{kind}_growth"] = most / least
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=SIZES[-1], help="The largest size.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measured([*(s for s in SIZES if s < options.machines), options.machines])
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:10}")


if __name__ == "__main__":
    main()
