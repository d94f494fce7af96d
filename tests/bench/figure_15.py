"""The paper's Figure 15: the recommended size, real size and CPU of a web tier over days.

    python -m tests.bench.figure_15 [--days 3] [--tasks 48] [--sudden] [--out FOLDER] [--json]

A web tier, one task on each machine, follows its load on the real control plane of a simulated
region, with the real autoscaler as its client. The load has a daily cycle: the maximum in the
evening, 45 % of it at night. Each evening at the peak a version is released; the job's
TaskController (stateless) releases fewer tasks the busier they are. `--sudden` is the paper's week
in spring 2020: from the second day on the load is 60 % higher, more than the entitlement can serve.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, SpeedLimit
from tests.loaded_jobs import LoadedJobs, LoadSample
from vm_lab.region.scenario import Scenario, ScenarioWork, Shape
from vm_lab.region.seed import SimulatedRegion
from vm_lab.region.topology import image

DAY_S = 86_400.0
CORES, TARGET = 6.0, 0.6
PEAK_HOUR = 18.0
SUDDEN = 1.6


@dataclass(frozen=True)
class Course:
    """One run: its samples, and the findings of the checker."""

    samples: list[LoadSample]
    violations: list[str]
    resizes: list[tuple[float, str, int, int]]
    machines: int
    releases: list[float]
    """Times at which a version was released."""

    def release_s(self, number: int) -> float:
        """Return how long a release took until no old task served."""
        began = self.releases[number]
        following = [at for at in self.releases if at > began] or [math.inf]
        old = [s.at for s in self.samples if began < s.at < following[0] and s.old]
        return max(old) - began

    def quiet(self, begin: float, end: float) -> list[LoadSample]:
        """Return the samples of a period, without the ten minutes after each release."""
        return [
            s
            for s in self.samples
            if begin <= s.at < end and not any(0 <= s.at - at < 600.0 for at in self.releases)
        ]

    def figures(self) -> dict[str, float]:
        """Return the numbers of the picture after the first day, without releases."""
        found = self.quiet(DAY_S, math.inf)
        peak = max(s.serving for s in found)
        low = min(s.machines for s in found)
        error = [abs(s.serving - s.recommended) / s.recommended for s in found if s.recommended]
        return {
            "peak tasks": peak,
            "fewest tasks": min(s.serving for s in found),
            "machines freed at most, share of peak": round(
                1 - low / max(s.machines for s in found), 3
            ),
            "machines freed in the mean, share of peak": round(
                1 - sum(s.machines for s in found) / len(found) / max(s.machines for s in found), 3
            ),
            "highest CPU": round(max(s.cpu for s in found), 3),
            "lowest CPU": round(min(s.cpu for s in found), 3),
            "real off recommended, mean": round(sum(error) / len(error), 3),
            "real below recommended, most": max(s.recommended - s.serving for s in found),
            **{f"release {n + 1}, s": self.release_s(n) for n in range(len(self.releases))},
            "resizes": len(self.resizes),
            "violations": len(self.violations),
        }


def policy(tasks: int) -> Autoscale:
    """Return the policy of the web tier."""
    return Autoscale(
        minimum=4,
        maximum=4 * tasks,
        target=TARGET,
        mode=AutoscaleMode.APPLY,
        headroom=Headroom.NONE,
        up=SpeedLimit(share=0.5, per_s=600.0),
        down=SpeedLimit(share=0.1, per_s=900.0),
    )


def replayed(days: float, tasks: int, *, sudden: bool = False, seed: int = 1) -> Course:
    """Run `days` days; `tasks` is the size at the peak of an ordinary day."""
    machines = math.ceil(tasks * 1.25)
    scenario = Scenario(
        name="figure-15",
        says="Figure 15",
        minutes=days * 1440.0,
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
        machine.pace.start = (20.0, 40.0)  # filling its caches: a release takes minutes

    def load(now: float) -> float:
        day = 0.725 + 0.275 * math.cos((now / 3600.0 - PEAK_HOUR) / 24 * 2 * math.pi)
        level = SUDDEN if sudden and now >= 2 * DAY_S else 1.0
        return tasks * CORES * TARGET * 0.9 * day * level

    jobs = LoadedJobs(region, {"job0": policy(tasks)}, {"job0": load})
    releases = [(n + PEAK_HOUR / 24) * DAY_S for n in range(1, int(days))]
    for number, at in enumerate(releases):
        region.timeline.at(at, jobs.release, "job0", image(0, number + 1), tasks)
    region.run([])
    violations = [str(v) for v in region.checker.violations]
    return Course(jobs.samples, violations, jobs.resizes, machines, releases)


def svg_of(course: Course) -> str:
    """Return the three curves of the paper: recommended size, real size, CPU."""
    width, height, edge = 900, 380, 60
    samples = course.samples[:: max(1, len(course.samples) // 800)]
    end = samples[-1].at
    most = max(max(s.recommended, s.serving) for s in samples)

    def line(values: Sequence[float], top: float, colour: str, dash: str = "") -> str:
        points = " ".join(
            f"{edge + s.at / end * (width - 2 * edge):.1f},"
            f"{height - edge - value / top * (height - 2 * edge):.1f}"
            for s, value in zip(samples, values, strict=True)
        )
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"'
            f' stroke-dasharray="{dash}"/>'
        )

    marks = "".join(
        f'<text x="{edge + d * DAY_S / end * (width - 2 * edge):.0f}" y="{height - edge + 18}"'
        f' text-anchor="middle">day {d}</text>'
        for d in range(int(end // DAY_S) + 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{edge}" y="24">Web tier: <tspan fill="#36c">recommended size</tspan>, '
        '<tspan fill="#c22">real size</tspan> (tasks, left), '
        '<tspan fill="#393">CPU of its tasks</tspan> (right)</text>'
        f'<text x="{edge - 8}" y="{edge + 4}" text-anchor="end">{most}</text>'
        f'<text x="{edge - 8}" y="{height - edge + 4}" text-anchor="end">0</text>'
        f'<text x="{width - edge + 8}" y="{edge + 4}">100 %</text>'
        f'<line x1="{edge}" x2="{width - edge}" y1="{height - edge}" y2="{height - edge}"'
        f' stroke="#999"/>{marks}'
        + line([s.recommended for s in samples], most, "#36c", "5 3")
        + line([s.serving for s in samples], most, "#c22")
        + line([s.cpu for s in samples], 1.0, "#393")
        + "</svg>\n"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--sudden", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the picture")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    course = replayed(options.days, options.tasks, sudden=options.sudden)
    figures = course.figures()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        name = "figure-15-sudden.svg" if options.sudden else "figure-15.svg"
        (options.out / name).write_text(svg_of(course))
    for name, value in figures.items():
        print(f"{name:45} {value:g}")
    for violation in course.violations[:5]:
        print(violation)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
