"""Once power is capped on one machine, tasks of neighbouring machines leave the place."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from virtual_time import run

from control_plane.api.settings import RebalanceMode
from control_plane.rebalancer.core import survey
from tests.bench.rebalance_power import Powered

pytestmark = pytest.mark.behaviour("RE6", "HC13", "WH10")


def test_after_a_power_cap_tasks_of_neighbouring_machines_leave() -> None:
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


@pytest.mark.behaviour("BUG-CP128")
def test_machines_that_join_while_power_is_added_up_do_not_stop_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(survey, "STEP", 1)

    async def main() -> None:
        w = Powered(RebalanceMode.RECOMMEND)
        async with asyncio.timeout(20_000), w.running():
            msb = await w.begin()
            await w.cap(w.by_tasks(msb)[0])
            numbers = iter(range(40))

            async def join() -> None:
                number = next(numbers, None)
                if number is not None:
                    machine = w.region.add(f"joins{number}", *msb.split("/"))
                    await w.cp.joined(machine.join())

            planner = w.cp.rebalancer.planner
            planner._runtime = SimpleNamespace(checkpoint=join, date=w.runtime.date)
            plan = await planner.plan(0)
            assert [power.place for power in plan.power if power.after_w < power.before_w] == [msb]

    run(main())
