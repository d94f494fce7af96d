"""Profile switches while the control plane's clock steps, and the cost of an idle machine."""

from __future__ import annotations

import asyncio

import pytest
import world as worlds
from virtual_time import clock, run
from world import World, a_region

from agent.api import ProfileState
from control_plane.runtime.runtime import SteppedRuntime


@pytest.mark.behaviour("BUG-CP9")
@pytest.mark.parametrize("step_s", [7_200.0, -3_600.0])
def test_a_step_of_the_clock_is_no_reboot_that_took_too_long(step_s):
    """The wait for a reboot uses a clock that does not step."""
    stepped = [0.0]

    async def main() -> None:
        w = World(a_region(1), reboot_grace_s=300.0)
        w.runtime = SteppedRuntime(lambda: clock() + stepped[0], 0)
        machine = w.region.machines["m1"]
        machine.behaviour.profile_end["web"] = ProfileState.PENDING_REBOOT
        machine.behaviour.reboot_s = 10_000.0  # the machine does not come back
        async with w.running():
            await w.set_up(1)
            await w.cp.apply_job(worlds.a_job(1))
            await w.until(lambda: not machine.on)
            stepped[0] = step_s
            await asyncio.sleep(200)
            view = await w.cp.get_machine("m1")
            assert view.record.entitlement == "front"
            await asyncio.sleep(200)
            view = await w.cp.get_machine("m1")
            assert not view.record.entitlement, "it is put aside when its time is over"

    run(main())


def test_machines_that_have_their_profile_have_no_task_of_the_switcher():
    async def main() -> None:
        w = World(a_region(60))
        async with w.running():
            await w.set_up(60)
            await w.cp.apply_job(worlds.a_job(60))
            await w.stable()
            await asyncio.sleep(5)
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert names.count("profiles") == 1

    run(main())


def test_refusals_are_counted_not_rounds():
    """Formerly any report of the machine counted one refusal again, up to five, and the machine was
    quarantined."""

    async def main() -> None:
        w = World(a_region(1))
        machine = w.region.machines["m1"]
        machine.behaviour.refuse_profile = "no such profile"
        async with w.running():
            await w.set_up(1)
            await w.cp.apply_job(worlds.a_job(1))
            observation = w.cp._observations.observation("m1")
            await w.until(lambda: observation.profile_refusals == 1)
            for _ in range(20):
                w.cp._observations.changed("m1")
                await asyncio.sleep(0.01)
            assert (await w.cp.get_machine("m1")).record.entitlement == "front"
            machine.behaviour.refuse_profile = ""
            await w.stable()
            assert observation.profile_refusals == 0
            assert not (await w.cp.get_machine("m1")).record.quarantine_reason

    run(main())


def test_a_machine_that_keeps_refusing_its_profile_is_quarantined():
    async def main() -> None:
        w = World(a_region(1))
        w.region.machines["m1"].behaviour.refuse_profile = "no such profile"
        async with w.running():
            await w.set_up(1)
            await w.cp.apply_job(worlds.a_job(1))

            async def is_aside() -> bool:
                record = (await w.cp.get_machine("m1")).record
                return "no such profile" in record.quarantine_reason and not record.entitlement

            await w.until(is_aside, 300)

    run(main())
