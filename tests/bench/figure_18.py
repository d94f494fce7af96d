"""The paper's Figure 18: when do machines change entitlement and host profile as sizes follow load?

    python -m tests.bench.figure_18 [--days 3] [--tasks 12] [--out FOLDER] [--json]

Two services, one task on each machine, with different host profiles, on the real control plane of a
simulated region with the real autoscaler as its client. The load of the first follows active users
(ALM): it rises in hours 3 to 8 and falls in hours 13 to 20. The second works in the hours with few
users. Their quotas exceed the number of machines, and the free pool is smaller than the number that
they exchange. So machines move from one to the other and change their profile.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.api.autoscale import Autoscale, AutoscaleMode, Headroom, SpeedLimit
from tests.loaded_jobs import LoadedJobs
from vm_lab.region.scenario import Scenario, ScenarioWork, Shape
from vm_lab.region.seed import SimulatedRegion

DAY_S, HOUR_S = 86_400.0, 3600.0
CORES, TARGET = 6.0, 0.6
LOW = 0.4
"""Load at night, as a share of the peak."""
ALM, OTHER = "ent0", "ent1"


@dataclass
class Flow:
    """One run: machines that moved to an entitlement, by hour of the day, after the first day."""

    tasks: int
    days: float
    came: dict[str, Counter[int]] = field(default_factory=dict)
    changed: dict[str, Counter[int]] = field(default_factory=dict)
    """Number of these machines that got another host profile."""
    machines: int = 0
    violations: list[str] = field(default_factory=list)

    def between(self, entitlement: str, first: int, last: int) -> int:
        """Return the number of machines that moved to an entitlement between these hours."""
        return sum(self.changed[entitlement][hour] for hour in range(first, last))

    def figures(self) -> dict[str, float]:
        """Return the numbers of the picture."""
        changes = sum(counts.total() for counts in self.changed.values())
        days = self.days - 1
        return {
            "to ALM services in hours 3 to 8": self.between(ALM, 3, 9),
            "to ALM services in all hours": self.changed[ALM].total(),
            "to other services in hours 13 to 20": self.between(OTHER, 13, 21),
            "to other services in all hours": self.changed[OTHER].total(),
            "days between two changes of a machine": round(
                days * self.machines / max(1, changes), 2
            ),
            "violations": len(self.violations),
        }


def alm_level(now: float) -> float:
    """Return the load of a service that follows the users, as a share of its peak."""
    hour = now / HOUR_S % 24
    if 3 <= hour < 8:
        return LOW + (1 - LOW) * (hour - 3) / 5
    if 8 <= hour < 13:
        return 1.0
    if 13 <= hour < 20:
        return 1 - (1 - LOW) * (hour - 13) / 7
    return LOW


def replayed(days: float, tasks: int, *, seed: int = 1) -> Flow:
    """Run `days` days; `tasks` is the size of each service at its peak."""
    machines, start = round(tasks * (1 + LOW)) + 2, max(2, round(tasks * LOW))
    scenario = Scenario(
        name="figure-18",
        says="Figure 18",
        minutes=days * 1440.0,
        settle_minutes=60.0,
        shape=Shape(machines=machines, msbs=2, racks=4, datacenters=1, cpus=8, memory_gib=8),
        work=ScenarioWork(
            entitlements=2,
            jobs=2,
            tasks=(start, start),
            spare=1.3 * tasks / (start * CORES / 8),
            overgranted=True,
            memory_mib=(5000, 5000),
            cpu_cores=(CORES, CORES),
            stop_jobs=0.0,
        ),
    )
    flow = Flow(tasks, days, {ALM: Counter(), OTHER: Counter()}, {ALM: Counter(), OTHER: Counter()})
    flow.machines = machines
    last: dict[str, str] = {}
    where: dict[str, str] = {}

    def passed(now: float) -> None:
        for name, checked in region.checker.machines.items():
            owner = checked.entitlement
            if owner == where.get(name, ""):
                continue
            where[name] = owner
            if owner and now >= DAY_S:
                hour = int(now / HOUR_S) % 24
                flow.came[owner][hour] += 1
                flow.changed[owner][hour] += last.get(name, owner) != owner
            if owner:
                last[name] = owner

    region = SimulatedRegion(scenario, seed, passed)
    policy = Autoscale(
        minimum=2,
        maximum=2 * tasks,
        target=TARGET,
        mode=AutoscaleMode.APPLY,
        headroom=Headroom.NONE,
        up=SpeedLimit(share=0.5, per_s=600.0),
        down=SpeedLimit(share=0.1, per_s=900.0),
    )
    peak = tasks * CORES * TARGET * 0.9
    loads = {
        "job0": lambda now: peak * alm_level(now),
        "job1": lambda now: peak * (1 + LOW - alm_level(now)),
    }
    LoadedJobs(region, dict.fromkeys(loads, policy), loads)
    region.run([])
    flow.violations = [str(v) for v in region.checker.violations]
    return flow


def svg_of(flow: Flow) -> str:
    """Return a bar for each hour of the day: to ALM services above the line, to others below."""
    width, height, edge = 900, 360, 50
    most = max([1, *(n for counts in flow.changed.values() for n in counts.values())])
    step, middle = (width - 2 * edge) / 24, height / 2
    bars = []
    for hour in range(24):
        for entitlement, colour, up in ((ALM, "#36c", True), (OTHER, "#c22", False)):
            size = flow.changed[entitlement][hour] / most * (middle - edge)
            top = middle - size if up else middle
            bars.append(
                f'<rect x="{edge + hour * step + 2:.1f}" y="{top:.1f}" width="{step - 4:.1f}"'
                f' height="{size:.1f}" fill="{colour}"/>'
            )
        bars.append(
            f'<text x="{edge + (hour + 0.5) * step:.1f}" y="{height - 16}" text-anchor="middle">'
            f"{hour}</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{edge}" y="24">Machines that change entitlement and host profile, by hour: '
        '<tspan fill="#36c">to ALM services</tspan>, <tspan fill="#c22">to others</tspan>'
        f" (at most {most} in an hour)</text>"
        f'<line x1="{edge}" x2="{width - edge}" y1="{middle}" y2="{middle}" stroke="#999"/>'
        + "".join(bars)
        + "</svg>\n"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--days", type=float, default=3.0)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--out", type=Path, help="folder for the picture")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    flow = replayed(options.days, options.tasks)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "figure-18.svg").write_text(svg_of(flow))
    for name, value in flow.figures().items():
        print(f"{name:45} {value:g}")
    for violation in flow.violations[:5]:
        print(violation)
    if options.json:
        print(json.dumps(flow.figures()))


if __name__ == "__main__":
    main()
