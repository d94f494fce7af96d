"""`Allocator.place`: jobs to machines without a scheduler, on stores or in memory."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from agent.api import Limits, Location
from control_plane.allocator.standalone import allocator_of, allocator_over
from control_plane.allocator.transactions import Allocation
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.policy import Admission, Preference, Property, Strategy
from control_plane.broker.keys import prefix_of
from control_plane.store.bulk import put_all
from control_plane.store.records import ENTITLEMENTS, encode
from control_plane.store.sqlite import SqliteStore
from wire.errors import Unprocessable

GIB = 1 << 30
FRONT = {"front": EntitlementSpec(machines=9)}


def machines(msbs: int = 3, each: int = 2, **fields: Any) -> list[MachineRecord]:
    """Machines `dc1-msb2-0` with room for four tasks each."""
    hardware = Hardware(**({"cpus": 4, "rru": 4.0, "memory_bytes": 10 * GIB} | fields))
    return [
        MachineRecord(
            machine=f"dc1-msb{msb}-{number}",
            location=Location(datacenter="dc1", msb=f"msb{msb}"),
            machine_type="web",
            hardware=hardware,
        )
        for msb in range(1, msbs + 1)
        for number in range(each)
    ]


def a_job(tasks: int, name: str = "web", **fields: Any) -> JobSpec:
    values = {
        "name": name,
        "entitlement": "front",
        "tasks": tasks,
        "image": "sha256:" + "1" * 64,
        "command": ["/bin/server"],
        "limits": Limits(memory_max_bytes=2 * GIB, cpu_max_cores=1.0),
    }
    return JobSpec(**(values | fields))


def per_msb(made: Allocation) -> list[int]:
    return sorted(Counter(claim.machine.place.msb for claim in made.claims or ()).values())


@pytest.mark.behaviour("AL1", "AL4", "AL8", "SC12")
async def test_a_program_places_a_job_with_one_call():
    async with allocator_of(machines(), FRONT) as allocator:
        made = await allocator.place(a_job(7))
        assert (per_msb(made), made.unplaced) == ([2, 2, 3], ())
        where = {claim.task: claim.machine.name for claim in made.claims or ()}
        again = await allocator.place(a_job(7))
        assert {claim.task: claim.machine.name for claim in again.claims or ()} == where
        assert allocator.allocations.counts.hits == 1
        more = await allocator.place(a_job(30))
        assert len(more.unplaced) == 6
        assert "6 machines: CPU: 1 cores wanted, at most 0 cores free" in more.reasons
        assert len((await allocator.place(a_job(3))).claims or ()) == 3
        await allocator.forget("web")
        assert allocator.index.claims == {}


async def test_a_plan_of_a_program_changes_nothing():
    async with allocator_of(machines(), FRONT) as allocator:
        found = await allocator.plan(a_job(4))
        assert len(found.of) == 4
        assert all(target.is_taken for target in found.of.values())
        assert allocator.index.claims == {}
        assert (await allocator.plan(a_job(40))).reasons


@pytest.mark.behaviour("CP3", "CP6", "CP7")
async def test_requests_of_a_program_keep_quotas_promises_and_priorities():
    granted = {
        "front": EntitlementSpec(machines=1, priority=900),
        "back": EntitlementSpec(machines=6, priority=100),
    }
    async with allocator_of(machines(), granted) as allocator:
        made = await allocator.place(a_job(6))
        assert made.unplaced == (4, 5)
        assert "6 free machines: the quota of machines is used up" not in made.reasons
        assert any("the quota of machines is used up" in reason for reason in made.reasons)
        await allocator.place(a_job(24, "big", entitlement="back", admission=Admission.GANG))
        assert "big" not in allocator.index.claims


@pytest.mark.behaviour("AL21", "BUG-CP15")
async def test_a_job_without_a_cpu_key_claims_the_default():
    async with allocator_of(machines(1, 1, memory_bytes=100 * GIB), FRONT) as allocator:
        made = await allocator.place(a_job(20, limits=Limits(memory_max_bytes=GIB)))
        assert len(made.unplaced) == 4  # 0.25 of 4 cores each


async def test_a_job_of_no_entitlement_is_refused():
    async with allocator_of(machines()) as allocator:
        with pytest.raises(Unprocessable, match="there is no entitlement 'front'"):
            await allocator.place(a_job(1))


@pytest.mark.behaviour("AL3")
async def test_tasks_leave_a_machine_that_is_closed_for_tasks():
    async with allocator_of(machines(), FRONT) as allocator:
        made = await allocator.place(a_job(3))
        lost = next(iter(made.claims or ())).machine.name
        await allocator.broker.carry_out(lost, MarkDown(reason="says the test"))
        after = await allocator.place(a_job(3))
        assert lost not in {claim.machine.name for claim in after.claims or ()}
        assert len(after.claims or ()) == 3


@pytest.mark.behaviour("AL12")
async def test_placements_survive_a_restart(tmp_path):
    async with SqliteStore(tmp_path / "store") as store:
        records = ((prefix_of("dc1") + m.machine, encode(m)) for m in machines())
        await put_all(store, records)
        record = EntitlementRecord(name="front", spec=FRONT["front"])
        await put_all(store, [(ENTITLEMENTS + "front", encode(record))])
        async with allocator_over(store) as allocator:
            made = await allocator.place(a_job(5))
            before = [claim.machine.name for claim in made.claims or ()]
    async with SqliteStore(tmp_path / "store") as store, allocator_over(store) as allocator:
        claims = allocator.index.claims["web"]
        assert [claim.machine.name for claim in claims] == before
        assert {claim.machine.pool for claim in claims} == {"front"}


@pytest.mark.behaviour("AL11")
async def test_several_programs_tasks_place_at_once_and_nothing_is_promised_twice():
    async with allocator_of(machines(4, 4), {"front": EntitlementSpec(machines=16)}) as allocator:
        made = await asyncio.gather(*(allocator.place(a_job(8, f"j{n}")) for n in range(10)))
        assert sum(len(each.claims or ()) for each in made) == 64
        assert all(m.free_cpu == 0 for m in allocator.index.machines.values())


@pytest.mark.behaviour("BUG-AL30")
async def test_jobs_of_one_entitlement_are_tried_again_in_the_order_in_which_they_came():
    """Jobs were tried again by name, so a job called zebra waited forever."""
    async with allocator_of(machines(1, 1), {"front": EntitlementSpec(machines=1)}) as allocator:
        await allocator.place(a_job(4, "full"))
        for name in ("zebra", "ant", "mule"):
            assert (await allocator.place(a_job(1, name))).unplaced
        await allocator.place(a_job(3, "full"))
        assert allocator.waiting.take_due() == ["zebra", "ant", "mule"]
        await allocator.place(a_job(1, "zebra"))
        await allocator.place(a_job(1, "ant"))  # a repeated request keeps its place in the order
        assert (await allocator.place(a_job(1, "zebra"))).unplaced == ()
        await allocator.place(a_job(2, "zebra"))
        await allocator.place(a_job(2, "full"))
        assert allocator.waiting.take_due() == ["ant", "mule", "zebra"]


@pytest.mark.behaviour("BUG-AL23")
async def test_a_repair_of_the_spread_keeps_to_the_preferences_before_it():
    """Repairs moved tasks against the first preference, and back again."""
    listed = [
        MachineRecord(
            machine=f"{dc}-{msb}-{n}",
            location=Location(datacenter=dc, msb=msb),
            machine_type="web",
            hardware=Hardware(cpus=4, rru=4.0, memory_bytes=10 * GIB),
        )
        for dc, msb in (("dc1", "msb1"), ("dc1", "msb2"), ("dc2", "msb3"))
        for n in range(2)
    ]
    first = Preference(property=Property.DATACENTER, strategy=Strategy.PREFER, values=["dc1"])
    over_msbs = Preference(property=Property.MSB, strategy=Strategy.EVEN)
    async with allocator_of(listed, FRONT) as allocator:
        spec = a_job(8, preferences=[first, over_msbs])
        for name in ("dc1-msb2-0", "dc1-msb2-1"):
            await allocator.broker.carry_out(name, MarkDown(reason="says the test"))
        made = await allocator.place(spec)
        assert per_msb(made) == [8]
        assert await allocator.repairs(allocator._request(spec), 3) == ()  # only dc2 has room
        await allocator.broker.carry_out("dc1-msb2-0", MarkUp())
        found = await allocator.repairs(allocator._request(spec), 3)
        assert {move.to_bin for move in found} == {"dc1/msb2"}
        assert len(found) == 3
        plain = a_job(8, preferences=[over_msbs])
        assert await allocator.repairs(allocator._request(plain), 3)
