"""Applications choose hardware and settings of the machines that they share."""

from collections import Counter

import pytest
from fake_agents import IMAGE, Region
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job

from agent.api.joining import JoinRequest
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import TaskPhase

pytestmark = pytest.mark.behaviour("WH3")


def typed(request: JoinRequest, kind: str) -> JoinRequest:
    return replace(request, machine_type=kind)


@pytest.mark.behaviour("WH3", "MO1", "MO14", "MO17", "AL20", "RB6")
def test_two_applications_get_the_hardware_and_the_profile_that_they_chose():
    # one allocator, one free pool; portal and broker decide
    async def main() -> None:
        region = Region()
        kinds = {}
        for number in range(6):
            name = f"m{number}"
            region.add(name, f"dc{number % 2}", f"msb{number % 3}")
            kinds[name] = "fast" if number < 3 else "large"
        world = World(region)
        async with world.running():
            for name, machine in region.machines.items():
                await world.cp.joined(typed(machine.join(), kinds[name]))
            await world.until(world.all_answer)
            for entitlement, kind, profile in (
                ("front", "fast", "web"),
                ("data", "large", "cache"),
            ):
                await world.cp.capacity.put_entitlement(
                    entitlement,
                    EntitlementSpec(machines=3, machine_types=[kind], host_profile=profile),
                )
                await world.cp.apply_job(
                    a_job(3, name=entitlement, entitlement=entitlement, machine_types=[kind])
                )
            await world.stable("front")
            await world.stable("data")
            views = (await world.cp.list_machines()).machines
            assert Counter((v.record.entitlement, v.record.machine_type) for v in views) == {
                ("front", "fast"): 3,
                ("data", "large"): 3,
            }
            assert {v.record.machine_type: v.record.profile for v in views} == {
                "fast": "web",
                "large": "cache",
            }
            record = (await world.cp.get_job("front")).record
            assert {task.version for task in record.tasks} == {1}  # all tasks are equal
            assert {task.phase for task in record.tasks} == {TaskPhase.RUNNING}
            assert record.spec.image == IMAGE
        assert region.broken_rules == []

    run(main())
