"""The deadline of planned maintenance takes precedence over budgets and lack of room."""

import asyncio

import pytest
from virtual_time import clock, run
from world import World, a_job, a_region, scenario

from agent.api import Limits
from control_plane.api.machines import EventKind
from control_plane.runtime.runtime import SteppedRuntime

LARGE = Limits(memory_max_bytes=700 << 20)


@pytest.mark.behaviour("RB3", "HC14")
@scenario()
async def test_tasks_without_another_place_leave_at_the_deadline_and_not_before(w: World):
    # invariant 4
    await w.set_up(quota=3)
    await w.until(w.all_answer)
    await w.cp.apply_job(a_job(3, limits=LARGE))
    await w.stable()
    full = ["m1", "m2", "m3"]
    now = clock()
    await w.cp.inventory.outages.plan_unavailability(
        [full[0]], EventKind.MAINTENANCE, "new memory", start=now, deadline=now + 60
    )
    await asyncio.sleep(50)
    assert [w.alive()[name] for name in full] == [1, 1, 1]
    detail = (await w.cp.get_job("web")).detail
    assert "waits for room" in detail
    assert "1 machine: is being taken for maintenance: new memory" in detail
    assert "the free pool is empty" in detail

    await asyncio.sleep(60)
    assert [w.alive()[name] for name in full] == [0, 1, 1]
    explained = await w.cp.job_planner.explain("web")
    assert explained.summary.startswith("2 of 3 placed; 1 waits: ")


@pytest.mark.behaviour("RB11", "CP3")
@scenario()
async def test_a_full_quota_keeps_no_task_on_a_machine_that_must_go(w: World):
    # machines that tasks must leave do not count, and return as soon as they are empty
    await w.set_up(quota=2)
    await w.until(w.all_answer)
    await w.cp.apply_job(a_job(2, limits=LARGE))
    await w.stable()
    (spare,) = [name for name in ("m1", "m2", "m3") if not w.alive()[name]]
    (going, *_) = [name for name in ("m1", "m2", "m3") if w.alive()[name]]
    await w.cp.inventory.outages.plan_unavailability(
        [going], EventKind.DECOMMISSION, "old", start=clock(), deadline=clock() + 3600
    )
    await w.until(lambda: w.alive()[spare] == 1 and not w.alive()[going])
    await asyncio.sleep(10)
    records = [view.record for view in (await w.cp.list_machines()).machines]
    assert [r.machine for r in records if r.entitlement != "front"] == [going]
    await w.cp.inventory.remove(going)


@pytest.mark.behaviour("BUG-CP9", "F-44")
def test_a_step_of_the_clock_ends_no_notice_not_even_over_a_restart():
    """All tasks were stopped at once, hours before the deadline."""

    async def main() -> None:
        stepped_s = 0.0
        w = World(a_region())
        w.runtime = SteppedRuntime(lambda: clock() + stepped_s, seed=0)
        begins = clock() + 600
        async with w.running():
            await w.set_up(quota=3)
            await w.until(w.all_answer)
            await w.cp.apply_job(a_job(3, limits=LARGE))
            await w.stable()
            await w.cp.inventory.outages.plan_unavailability(
                ["m1", "m2"], EventKind.MAINTENANCE, "new memory", deadline=begins
            )
            await asyncio.sleep(60)
            stepped_s = 7_200.0
            await asyncio.sleep(60)
            assert w.alive().total() == 3
        w.runtime = SteppedRuntime(lambda: clock() + stepped_s, seed=1)
        async with w.running():
            while clock() < begins - 5:
                assert w.alive().total() == 3
                await asyncio.sleep(5)
            await w.until(lambda: w.alive().total() == 1)
        assert w.region.broken_rules == []

    run(main())
