"""What does an allocation with preferences over racks and rows cost, by size of the region?

    python -m tests.bench.preference_cost [--json] [--machines 1000000]

One pool has all machines of a region, in racks of 36, rows of 24 racks and 12 MSBs. New jobs of 36
tasks are placed one after another with the default spread, with `rack even` and with `row even`
before it. The bench measures the CPU time of a plan, the median of 40 after 5 uncounted ones, in
four states: `room`, `power` (room, and sufficient power budgets), `no_power` (the budgets are used
up) and `full` (no machine has room for a task). `…_over_default` is a preference's time over that
of the default spread in the state, `…_growth` that at the largest size over that at the smallest
(BUG-AL27; goals: at most 3 for each).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator

from agent.api import Location
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.preferences import DEFAULT, spread_by_default
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.api.policy import Preference
from control_plane.api.settings import PowerSettings
from control_plane.broker.core.capacity import Capacity, Place

SMALLEST, LARGEST = 10_000, 1_000_000
RACK, ROW, MSBS, DATACENTERS = 36, 24, 12, 4
TASKS, COUNTED, WARM = 36, 40, 5
GIB = 1 << 30
POOL = "e1"
TASK, WHOLE = Demand(memory_bytes=2 * GIB, cpus=1.0), Demand(memory_bytes=32 * GIB, cpus=16.0)
PREFERENCES = {
    "default": DEFAULT,
    "rack": spread_by_default((Preference(property="rack"),)),
    "row": spread_by_default((Preference(property="row"),)),
}


def region(machines: int, state: str, pool: str = POOL) -> RegionIndex:
    """Return an index of `machines` machines in a state."""
    watts = 99 if state == "no_power" else 1 << 40
    budgets = {f"dc{n}": watts for n in range(DATACENTERS)}
    power = Power(PowerSettings(budgets_w=budgets, overcommit=1.0))
    index = RegionIndex() if state == "room" else RegionIndex(power)
    capacity = Capacity(machine_type="t", rru=16.0, cpus=16.0, memory_bytes=32 * GIB, power_w=100)
    index.put_many((f"m{n:07}", capacity, _place(n), pool, "") for n in range(machines))
    if state == "full":
        held = enumerate(index.machines.values())
        index.restore("others", POOL, [Claim(n, machine, WHOLE) for n, machine in held])
    return index


def _place(number: int) -> Place:
    rack = number // RACK
    msb = rack % MSBS
    row = f"row{rack // MSBS // ROW}"
    where = Location(datacenter=f"dc{msb % DATACENTERS}", msb=f"msb{msb}", row=row, rack=f"r{rack}")
    return Place.of(where)


def asks_ms(index: RegionIndex, name: str) -> Iterator[float]:
    """Place new jobs, and yield the CPU time of each plan in milliseconds."""
    for number in range(WARM + COUNTED):
        group = Group(TASK, tuple(range(TASKS)))
        request = Request(f"{name}-{number}", POOL, (group,), PREFERENCES[name])
        began = time.process_time()
        made = plan(index, request, Allowance(machines=0))
        took = time.process_time() - began
        assert index.reserve(made.change) == ()
        index.settle(made.change)
        if number >= WARM:
            yield took * 1e3


def measured(sizes: list[int]) -> dict[str, float]:
    """Return all figures."""
    found: dict[str, float] = {}
    for state in ("room", "power", "no_power", "full"):
        for size in sizes:
            index = region(size, state)
            gc.collect()
            gc.freeze()
            for name in PREFERENCES:
                found[f"{state}_{name}_ms_{size}"] = statistics.median(asks_ms(index, name))
            del index
            gc.unfreeze()
        for name in PREFERENCES:
            least, most = (found[f"{state}_{name}_ms_{size}"] for size in (sizes[0], sizes[-1]))
            found[f"{state}_{name}_growth"] = most / least
        for name in ("rack", "row"):
            of_size = [
                found[f"{state}_{name}_ms_{s}"] / found[f"{state}_default_ms_{s}"] for s in sizes
            ]
            found[f"{state}_{name}_over_default"] = max(of_size)
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=LARGEST, help="The largest size.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [size for size in (SMALLEST, 100_000) if size < options.machines]
    figures = measured([*sizes, options.machines])
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:10}")


if __name__ == "__main__":
    main()
