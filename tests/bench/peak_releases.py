"""TC14: how long does a release take over the day, when capacity is short at the peak?

    python -m tests.bench.peak_releases [--tasks 12] [--out FOLDER] [--json]

A web tier of a fixed size on the real control plane of a simulated region. Its load has a daily
cycle. A new image appears every three hours, and the conveyor releases it to the canary, half and
all. The job's TaskController (stateless) releases fewer tasks the busier they are; no other
component knows about the peak. The picture has the load and a bar for each run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.api.autoscale import Autoscale
from conveyor.runs import PipelineRun
from tests.loaded_jobs import LoadedJobs, LoadSample
from vm_lab.region.delivery import DeliveredJobs
from vm_lab.region.scenario import Scenario, ScenarioWork, Shape
from vm_lab.region.seed import SimulatedRegion

DAY_S, HOUR_S = 86_400.0, 3600.0
CORES = 6.0
MINUTE_PX = 14.0
"""Height of a minute in the picture."""
PEAK_HOUR = 18.0
PEAK, NIGHT = 0.80, 0.30
"""CPU of the tasks at the busiest and at the quietest time."""
RELEASES_H = tuple(range(3, 24, 3))


@dataclass(frozen=True)
class DayOfReleases:
    """One simulated day."""

    samples: list[LoadSample]
    runs: list[PipelineRun]
    violations: list[str]
    zero: float
    """The time of the wall clock when the region began, in seconds since 1970."""

    def took_s(self) -> dict[float, float]:
        """Return hour of the day → duration of the run that began then, in seconds."""
        return {
            round((run.created - self.zero) / HOUR_S, 1): (run.ended or math.inf) - run.created
            for run in self.runs
        }


def level(now: float) -> float:
    """Return the CPU that the tasks need together, as a share of their CPU."""
    middle, half = (PEAK + NIGHT) / 2, (PEAK - NIGHT) / 2
    return middle + half * math.cos((now / HOUR_S - PEAK_HOUR) / 24 * 2 * math.pi)


def simulated(
    tasks: int, hours: float = 24.0, at: Sequence[int] = RELEASES_H, seed: int = 1
) -> DayOfReleases:
    """Run one day, with a new image at some hours of it."""
    machines = tasks + 2
    scenario = Scenario(
        name="peak-releases",
        says="Releases over a day",
        minutes=hours * 60,
        settle_minutes=60.0,
        shape=Shape(machines=machines, msbs=4, racks=8, datacenters=2, cpus=8, memory_gib=8),
        work=ScenarioWork(
            entitlements=1,
            jobs=1,
            tasks=(tasks, tasks),
            spare=(machines - 1) / (tasks * CORES / 8),
            memory_mib=(5000, 5000),
            cpu_cores=(CORES, CORES),
            stop_jobs=0.0,
            controlled=1.0,
            controllers=["stateless"],
        ),
    )
    region = SimulatedRegion(scenario, seed)
    for machine in region.machines.values():
        machine.pace.start = (20.0, 40.0)  # its caches to fill
    zero = region.plane.wall_time()
    fixed = dict[str, Autoscale]()
    loaded = LoadedJobs(region, fixed, {"job0": lambda now: tasks * CORES * level(now)})
    delivered = DeliveredJobs(region, 1, is_random=False)
    for hour in at:
        region.timeline.at(hour * HOUR_S, delivered.release, "job0", "good")
    region.run([])
    runs = [run for run in delivered.runs.values() if run.steps]
    violations = [str(v) for v in region.checker.violations]
    return DayOfReleases(loaded.samples, sorted(runs, key=lambda r: r.number), violations, zero)


def svg_of(day: DayOfReleases) -> str:
    """Return the load over the day, and a bar for each run with its minutes."""
    width, height, edge = 900, 320, 50
    wide, high = width - 2 * edge, height - 2 * edge

    def x(seconds: float) -> float:
        return edge + seconds / DAY_S * wide

    points = " ".join(
        f"{x(s.at):.1f},{height - edge - s.cpu * high:.1f}" for s in day.samples if s.at <= DAY_S
    )
    bars = ""
    for run in day.runs:
        began, ended = run.created - day.zero, (run.ended or run.created) - day.zero
        minutes = (ended - began) / 60
        high_bar = minutes * MINUTE_PX
        bars += (
            f'<rect x="{x(began) - 8:.1f}" y="{height - edge - high_bar:.1f}" width="16"'
            f' height="{high_bar:.1f}" fill="#36c" opacity="0.7">'
            f"<title>run {run.number}</title></rect>"
            f'<text x="{x(began):.1f}" y="{height - edge - high_bar - 6:.1f}"'
            f' text-anchor="middle">{minutes:.1f} min</text>'
        )
    hours = "".join(
        f'<text x="{x(h * HOUR_S):.0f}" y="{height - edge + 18}" text-anchor="middle">{h}:00</text>'
        for h in range(0, 25, 3)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{edge}" y="24"><tspan fill="#393">CPU of the tasks that serve</tspan>, and'
        ' <tspan fill="#36c">runs of the pipeline</tspan> with how long they took</text>'
        f'<text x="{edge - 8}" y="{edge + 4}" text-anchor="end">100 %</text>'
        f'<line x1="{edge}" x2="{width - edge}" y1="{height - edge}" y2="{height - edge}"'
        f' stroke="#999"/>{hours}'
        f'<polyline points="{points}" fill="none" stroke="#393" stroke-width="1.5"/>{bars}</svg>\n'
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--out", type=Path, help="folder for the picture")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    day = simulated(options.tasks)
    if options.out is not None:
        (options.out / "peak-releases.svg").write_text(svg_of(day))
    took = day.took_s()
    if options.json:
        figures = {f"release at {hour:g} h, s": round(s) for hour, s in took.items()}
        print(json.dumps(figures | {"violations": len(day.violations)}))
        return
    for hour, seconds in took.items():
        print(f"{hour:5.1f} h  CPU {level(hour * HOUR_S):.0%}  {seconds:6.0f} s")
    print("\n".join(day.violations) or "no rule was broken")


if __name__ == "__main__":
    main()
