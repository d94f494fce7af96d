"""Power of an MSB during four events, with and without the ReBalancer (paper §5.2).

    python -m tests.bench.rebalance_power [--json] [--svg FILE]

More traffic, a load test, new racks next to the old ones, and a release that needs more. The whole
control plane runs on a virtual clock with agents in memory; a modelled controller of each MSB caps
power, as Dynamo does, when the draw exceeds the MSB's limit. In the third region the ReBalancer
begins only five minutes after power was capped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "control_plane" / "services"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "control_plane" / "rebalancer"))

from fake_agents import IMAGE_2
from msgspec.structs import replace
from test_rebalancer import Rebalanced
from virtual_time import run
from world import a_job

from agent.api import Limits
from control_plane.api.inventory import InventoryMachine
from control_plane.api.machines import EventKind, Hardware
from control_plane.api.policy import Fit
from control_plane.api.rebalancing import MoveState, PauseRequest
from control_plane.api.settings import PowerSettings, RebalanceMode

NOMINAL_W, IDLE_W, PER_CORE_W = 400, 200.0, 100.0
BUDGET_W = 1600
MSBS = ("dc1/msb1", "dc1/msb2", "dc2/msb3")
BIG = Limits(memory_max_bytes=256 << 20)
JOBS = [f"web{n}" for n in range(6)]


class Powered(Rebalanced):
    """Twelve machines in three MSBs; only power matters."""

    def __init__(self, mode: RebalanceMode) -> None:
        knobs = {"tolerance": 1.0, "hot_from": 1.0, "measure_s": 10.0, "smooth_s": 30.0}
        super().__init__(mode, **knobs, rest_s=600.0)
        budgets = dict.fromkeys(MSBS, BUDGET_W)
        power = PowerSettings(budgets_w=budgets, overcommit=3.0)
        self.settings = replace(self.settings, power=power)
        self.done = 0
        """Number of moves of the ReBalancer."""
        self.capped: list[str] = []
        """The machines that the modelled controllers capped, in order."""
        self.over_s = 0.0
        """Seconds during which some MSB drew more than its limit."""
        self.watts: list[tuple[float, list[float]]] = []
        """Samples: time, and the power of each MSB."""
        self.late_from = -1
        """The ReBalancer continues with the sample after this one; -1: it was never held."""

    def drawn(self, msb: str) -> float:
        """Return the power of an MSB."""
        where, used = self.region.where(), self.region.used
        return sum(
            IDLE_W + PER_CORE_W * sum(used.get(task, (0.0, 0))[0] for task in where[name])
            for name, machine in self.region.machines.items()
            if f"{machine.location.datacenter}/{machine.location.msb}" == msb
        )

    def hottest(self) -> str:
        return max(MSBS, key=self.drawn)

    async def control(self) -> None:
        """Cap the machine that draws most in each MSB above its limit; repeat until cancelled."""
        while True:
            await asyncio.sleep(10)
            now = asyncio.get_running_loop().time()
            self.watts.append((now, [self.drawn(msb) for msb in MSBS]))
            for msb in MSBS:
                if self.drawn(msb) > BUDGET_W:
                    self.over_s += 10
                    await self.cap(self.by_tasks(msb)[-1])

    def by_tasks(self, msb: str) -> list[str]:
        """Return the machines of an MSB, those with the fewest tasks first."""
        where = self.region.where()
        names = [
            name
            for name, machine in self.region.machines.items()
            if f"{machine.location.datacenter}/{machine.location.msb}" == msb
        ]
        return sorted(names, key=lambda name: len(where[name]))

    async def cap(self, machine: str) -> None:
        if machine not in self.capped:
            self.capped.append(machine)
            outages = self.cp.inventory.outages
            await outages.plan_unavailability([machine], EventKind.POWER_CAP, "breaker of the MSB")

    async def begin(self) -> str:
        """Run six packed jobs of one task; return the MSB that has most of them."""
        await self.set_up(12)
        await self.equip(list(self.region.machines))
        for job in JOBS:
            await self.cp.apply_job(a_job(1, name=job, fit=Fit.TIGHT, limits=BIG))
            await self.stable(job)
        self.use(0.3)
        return self.hottest()

    async def equip(self, names: list[str]) -> None:
        hardware = Hardware(cpus=2, memory_bytes=1 << 30, power_w=NOMINAL_W, rru=2.0)
        machines = [self.region.machines[name] for name in names]
        await self.cp._broker.import_machines(
            [
                InventoryMachine(
                    machine=m.name, location=m.location, machine_type="web", hardware=hardware
                )
                for m in machines
            ]
        )

    def use(self, cores: float) -> None:
        self.region.used |= {f"{job}-0": (cores, 64 << 20) for job in JOBS}


async def four_events(w: Powered) -> None:
    """Run the four events of the account, ten minutes apart."""
    msb = await w.begin()
    await asyncio.sleep(600)
    w.use(0.45)  # 1: traffic moves in
    await asyncio.sleep(600)
    await w.cp.apply_job(a_job(1, name="loadtest", fit=Fit.TIGHT, limits=BIG))  # 2: a load test
    await w.stable("loadtest")
    w.region.used |= {"loadtest-0": (0.9, 64 << 20)}
    await asyncio.sleep(600)
    for name in ("new1", "new2"):  # 3: new racks next to the old ones
        machine = w.region.add(name, *msb.split("/"))
        await w.cp.joined(machine.join())
    await w.equip(["new1", "new2"])
    await asyncio.sleep(600)
    w.use(0.6)  # 4: a release that needs more
    for job in JOBS:
        await w.cp.apply_job(a_job(1, name=job, fit=Fit.TIGHT, limits=BIG, image=IMAGE_2))
    await asyncio.sleep(1_200)


def played(mode: RebalanceMode, *, late: bool = False) -> Powered:
    """Return the region after the four events; `late`: the ReBalancer waits for a capping."""

    async def main() -> Powered:
        w = Powered(mode)
        async with asyncio.timeout(40_000), w.running():
            controller = asyncio.create_task(w.control())
            resumed = None
            if late:
                await w.cp.rebalancer.pause(PauseRequest(reason="not yet"), "a test")
                resumed = asyncio.create_task(resume_once_capped(w))
            await four_events(w)
            controller.cancel()
            if resumed is not None:
                await resumed
            w.done = sum(m.state is MoveState.DONE for m in w.cp.rebalancer.history().moves)
        assert w.region.broken_rules == []
        return w

    return run(main())


async def resume_once_capped(w: Powered) -> None:
    """Let the ReBalancer continue five minutes after power was capped."""
    while not w.capped:
        await asyncio.sleep(10)
    await asyncio.sleep(300)
    w.late_from = len(w.watts)
    await w.cp.rebalancer.resume()


def figures_of(w: Powered) -> dict[str, Any]:
    """Return the figures of one region."""
    worst = [max(row) for _, row in w.watts]
    found: dict[str, Any] = {
        "budget_w": BUDGET_W,
        "most_drawn_w": round(max(worst)),
        "over_budget_s": round(w.over_s),
        "machines_capped": len(w.capped),
        "moves": w.done,
        "drawn_at_the_end_w": round(worst[-1]),
    }
    if w.late_from >= 0:
        found["drawn_when_it_began_w"] = round(max(worst[w.late_from - 3 : w.late_from]))
    return found


def picture(regions: dict[str, Powered]) -> str:
    """Return the power of the highest MSB over time as SVG, one curve per region."""
    wide, high = 860, 260
    end = max(w.watts[-1][0] for w in regions.values())
    most = max(max(row) for w in regions.values() for _, row in w.watts) * 1.05
    colours = dict(zip(regions, ("#c62828", "#1565c0", "#2e7d32"), strict=False))
    parts = []
    for place, (name, w) in enumerate(regions.items()):
        points = " ".join(
            f"{60 + wide * at / end:.1f},{20 + high * (1 - max(row) / most):.1f}"
            for at, row in w.watts
        )
        colour = colours[name]
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        parts.append(f'<text x="{70 + 250 * place}" y="{high + 62}" fill="{colour}">{name}</text>')
    line = 20 + high * (1 - BUDGET_W / most)
    parts += [
        f'<line x1="60" x2="{60 + wide}" y1="{line:.1f}" y2="{line:.1f}" stroke="#555"'
        ' stroke-dasharray="5 4"/>',
        f'<text x="64" y="{line - 4:.1f}">budget {BUDGET_W} W</text>',
    ]
    for minute in range(0, int(end // 60) + 1, 10):
        x = 60 + wide * minute * 60 / end
        parts.append(f'<text x="{x:.0f}" y="{high + 38}" text-anchor="middle">{minute} min</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 90} {high + 75}"'
        ' font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        '<text x="60" y="14">watts of the MSB that draws most; four events in turn</text>'
        + "".join(parts)
        + "</svg>\n"
    )


def main() -> None:
    """Print the figures of the three regions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    regions = {
        "without the ReBalancer": played(RebalanceMode.OFF),
        "with it": played(RebalanceMode.APPLY),
        "with it, once power was capped": played(RebalanceMode.APPLY, late=True),
    }
    found = {name: figures_of(w) for name, w in regions.items()}
    if options.svg is not None:
        options.svg.write_text(picture(regions))
    print(json.dumps(found) if options.json else "\n".join(f"{k:32} {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
