"""What does a simulated region cost: a seed of faults, and a machine of an idle region?

    python tests/bench/simulation.py --json

`cpu_s_per_seed` is for 100 machines, 20 jobs and 15 minutes of every fault, until everything is at
rest, the checker included. `seeds_per_min`: the same in two processes. `idle_us_per_machine_s`: an
hour of 2,000 idle machines, minus the time to build the region and start its jobs.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time

from msgspec.structs import replace

from vm_lab.region import scenario
from vm_lab.region.run import Job, run_many, run_one
from vm_lab.region.seed import SimulatedRegion

PROCESSES = 2


def seeds(count: int) -> dict[str, float]:
    """Run seeds of the measured scenario, one by one and in two processes."""
    chosen = scenario.load("hundred")
    outcomes = [run_one(Job(chosen, seed)) for seed in range(1, count + 1)]
    began = time.perf_counter()
    run_many([Job(chosen, seed) for seed in range(1, 2 * count + 1)], PROCESSES)
    spent = time.perf_counter() - began
    return {
        "seeds": count,
        "cpu_s_per_seed": round(statistics.mean(o.cpu_s for o in outcomes), 3),
        "seeds_per_min": round(2 * count / spent * 60, 1),
        "broken": sum(not outcome.ok for outcome in outcomes),
    }


def idle(machines: int, hours: float) -> dict[str, float]:
    """Run an idle region for some time, and for a tenth of it."""
    short, long = (_cpu_s(machines, hours * share) for share in (0.1, 1.0))
    seconds = hours * 0.9 * 3600
    return {
        "machines": machines,
        "idle_us_per_machine_s": round((long - short) / seconds / machines * 1e6, 3),
    }


def _cpu_s(machines: int, hours: float) -> float:
    quiet = scenario.load("quiet")
    shape = replace(quiet.shape, machines=machines, racks=max(1, machines // 20))
    chosen = replace(quiet, minutes=hours * 60, shape=shape)
    region = SimulatedRegion(chosen, 1)
    began = time.process_time()
    region.run([])
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--machines", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    figures = {**seeds(options.seeds), **idle(options.machines, options.hours)}
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<24} {value}")


if __name__ == "__main__":
    main()
