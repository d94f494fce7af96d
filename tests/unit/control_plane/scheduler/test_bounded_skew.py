"""Tasks that wait because of a bound on skew, in the assembled control plane."""

import asyncio

import pytest
from fake_agents import Region
from virtual_time import run
from world import World, a_job

from agent.api import Limits
from control_plane.api.machines import EventKind
from control_plane.api.policy import Preference, Property

BOUND = [Preference(property=Property.MSB, max_skew=1)]
NEVER_S = 100_000


@pytest.mark.behaviour("AL5")
def test_a_task_is_tried_again_at_once_when_the_bin_that_held_it_up_counts_no_more():
    """No machine gains room and no check is due, so nothing else would wake the task."""
    region = Region()
    for name, msb, memory_mib in (("m1", "msb1", 4096), ("m2", "msb2", 4096), ("m3", "msb3", 1000)):
        region.add(name, "dc1", msb, memory_mib)

    async def main() -> None:
        w = World(region, resync_s=NEVER_S)
        async with w.running():
            await w.set_up()
            large = Limits(memory_max_bytes=600 << 20)
            await w.cp.apply_job(a_job(1, name="full", requires=["machine = m3"], limits=large))
            await w.until(lambda: w.alive()["m3"] == 1)
            await w.cp.apply_job(a_job(3, preferences=BOUND, limits=large))
            await w.until(lambda: w.alive().total() == 3)
            await asyncio.sleep(600)
            assert w.alive() == {"m1": 1, "m2": 1, "m3": 1}
            assert "ahead of the emptiest msb" in (await w.cp.get_job("web")).detail
            await w.cp.inventory.outages.plan_unavailability(["m3"], EventKind.MAINTENANCE, "work")
            await w.until(lambda: w.alive()["m1"] + w.alive()["m2"] == 3, 30)

    run(main())
    assert region.broken_rules == []
