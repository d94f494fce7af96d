"""RE6, HC13, WH10: places that draw too much are relieved before power is capped, and after.

The four events of the paper's account (§5.2) fall on one MSB: more traffic, a load test, new racks
beside the old ones, and a release that needs more. A modelled controller of the MSB caps power, as
Dynamo does, when more is drawn than it bears.
"""

import asyncio

from fake_agents import IMAGE_2
from msgspec.structs import replace
from test_rebalancer import Rebalanced
from virtual_time import run
from world import a_job

from agent.api import Limits
from control_plane.api.inventory import InventoryMachine
from control_plane.api.machines import EventKind, Hardware
from control_plane.api.policy import Fit
from control_plane.api.rebalancing import MoveState
from control_plane.api.settings import PowerSettings, RebalanceMode

NOMINAL_W, IDLE_W, PER_CORE_W = 400, 200.0, 100.0
BUDGET_W = 1600
MSBS = ("dc1/msb1", "dc1/msb2", "dc2/msb3")
BIG = Limits(memory_max_bytes=256 << 20)
JOBS = [f"web{n}" for n in range(6)]


class Powered(Rebalanced):
    """Twelve machines in three MSBs; what matters is power alone."""

    def __init__(self, mode: RebalanceMode) -> None:
        knobs = {"tolerance": 1.0, "hot_from": 1.0, "measure_s": 10.0, "smooth_s": 30.0}
        super().__init__(mode, **knobs, rest_s=600.0)
        budgets = dict.fromkeys(MSBS, BUDGET_W)
        power = PowerSettings(budgets_w=budgets, overcommit=3.0)
        self.settings = replace(self.settings, power=power)
        self.done = 0
        """Moves of the ReBalancer."""
        self.capped: list[str] = []
        """What the modelled controllers capped, in order."""
        self.over_s = 0.0
        """For how long some MSB drew more than it bears."""

    def drawn(self, msb: str) -> float:
        """Return what an MSB draws."""
        where, used = self.region.where(), self.region.used
        return sum(
            IDLE_W + PER_CORE_W * sum(used.get(task, (0.0, 0))[0] for task in where[name])
            for name, machine in self.region.machines.items()
            if f"{machine.location.datacenter}/{machine.location.msb}" == msb
        )

    def hottest(self) -> str:
        return max(MSBS, key=self.drawn)

    async def control(self) -> None:
        """Cap the machine that draws most of each MSB that draws too much, until cancelled."""
        while True:
            await asyncio.sleep(10)
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
        """Run six jobs of one task, packed; return the MSB that has most of them."""
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
    """Let the events of the account happen, ten minutes apart."""
    msb = await w.begin()
    await asyncio.sleep(600)
    w.use(0.45)  # 1: traffic moves in
    await asyncio.sleep(600)
    await w.cp.apply_job(a_job(1, name="loadtest", fit=Fit.TIGHT, limits=BIG))  # 2: a load test
    await w.stable("loadtest")
    w.region.used |= {"loadtest-0": (0.9, 64 << 20)}
    await asyncio.sleep(600)
    for name in ("new1", "new2"):  # 3: new racks beside the old ones
        machine = w.region.add(name, *msb.split("/"))
        await w.cp.joined(machine.join())
    await w.equip(["new1", "new2"])
    await asyncio.sleep(600)
    w.use(0.6)  # 4: a release that needs more
    for job in JOBS:
        await w.cp.apply_job(a_job(1, name=job, fit=Fit.TIGHT, limits=BIG, image=IMAGE_2))
    await asyncio.sleep(1_200)


def played(mode: RebalanceMode) -> Powered:
    async def main() -> Powered:
        w = Powered(mode)
        async with asyncio.timeout(40_000), w.running():
            controller = asyncio.create_task(w.control())
            await four_events(w)
            controller.cancel()
            w.done = sum(m.state is MoveState.DONE for m in w.cp.rebalancer.history().moves)
        assert w.region.broken_rules == []
        return w

    return run(main())


def test_four_events_cap_power_without_the_rebalancer_and_not_with_it() -> None:
    without, with_it = played(RebalanceMode.OFF), played(RebalanceMode.APPLY)

    assert without.capped
    assert without.over_s > 0
    assert (with_it.capped, with_it.over_s) == ([], 0.0)
    assert with_it.done > 0


def test_after_power_was_capped_on_one_machine_tasks_of_others_beside_it_leave_the_place() -> None:
    async def main() -> None:
        w = Powered(RebalanceMode.RECOMMEND)
        async with asyncio.timeout(20_000), w.running():
            msb = await w.begin()
            await asyncio.sleep(60)
            assert (await w.cp.rebalancer.plan()).moves == []
            await w.cap(w.by_tasks(msb)[0])
            plan = await w.cp.rebalancer.plan()
            (place,) = [power for power in plan.power if power.place == msb]
            assert place.limit_w < place.before_w
            moves = [move for move in plan.moves if move.why == f"power of {msb}"]
            assert moves, (plan.goals, plan.power, plan.movable, plan.moves)
            assert place.after_w < place.before_w

    run(main())
