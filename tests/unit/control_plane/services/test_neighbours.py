"""Jobs that are placed apart from or together with other jobs."""

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from test_commit import stocked
from test_growing_and_shrinking import SMALL, entitle, job, on, region_of
from test_growing_and_shrinking import hosts as hosts_of
from world import World

from agent.api import Limits, Location
from control_plane.allocator.core.request import NeighbourJobs
from control_plane.allocator.standalone import allocator_of, allocator_over
from control_plane.allocator.transactions import Allocation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.policy import Neighbour, Preference, Property, Strategy
from control_plane.store.memory import MemoryStore
from wire.errors import InvalidInput

GIB = 1 << 30

FRONT = {"front": EntitlementSpec(machines=99)}
BIG = {"cpus": 64, "rru": 64.0, "memory_bytes": 640 * GIB}
PACK = [Preference(property=Property.MACHINE, strategy=Strategy.PACK)]


def machines(msbs: int, each: int, **fields: Any) -> list[MachineRecord]:
    """Return machines with room for four tasks each."""
    hardware = Hardware(**({"cpus": 4, "rru": 4.0, "memory_bytes": 10 * GIB} | fields))
    return [
        MachineRecord(
            machine=f"msb{msb}-{number}",
            location=Location(msb=f"msb{msb}"),
            machine_type="web",
            hardware=hardware,
        )
        for msb in range(msbs)
        for number in range(each)
    ]


def a_job(tasks: int, name: str, **fields: Any) -> JobSpec:
    return JobSpec(
        name=name,
        entitlement="front",
        tasks=tasks,
        image="sha256:" + "1" * 64,
        command=["/bin/server"],
        limits=Limits(memory_max_bytes=2 * GIB, cpu_max_cores=1.0),
        **fields,
    )


def near(job: str, level: Property = Property.MACHINE) -> list[Neighbour]:
    return [Neighbour(job=job, property=level)]


def hosts(made: Allocation) -> set[str]:
    return {claim.machine.name for claim in made.claims or ()}


def msbs(made: Allocation) -> set[str]:
    return {claim.machine.place.msb for claim in made.claims or ()}


@pytest.mark.parametrize("first_names_it", [True, False])
async def test_jobs_keep_apart_whichever_names_the_other_or_comes_first(first_names_it: bool):
    rules: dict[str, Any] = {"apart_from": near("b" if first_names_it else "a")}
    async with allocator_of(machines(2, 2), FRONT) as allocator:
        if not first_names_it:  # later requests are known in advance, as job files are
            allocator._affinity.note("b", NeighbourJobs.of(a_job(1, "b", **rules)))
        one = await allocator.place(a_job(3, "a", **(rules if first_names_it else {})))
        other = await allocator.place(a_job(9, "b", **({} if first_names_it else rules)))
        assert len(hosts(one)) == len(hosts(other)) == 2
        assert not hosts(one) & hosts(other)
        assert len(other.unplaced) == 1
        assert "2 machines: in the machine of a task of a" in other.reasons


async def test_apart_may_mean_another_part_of_the_region():
    async with allocator_of(machines(3, 2, **BIG), FRONT) as allocator:
        one = await allocator.place(a_job(2, "a", preferences=PACK))
        other = await allocator.place(a_job(6, "b", apart_from=near("a", Property.MSB)))
        assert len(msbs(one)) == 1
        assert len(msbs(other)) == 2
        assert not msbs(one) & msbs(other)


async def test_a_job_goes_where_the_other_is_and_waits_until_it_is_there():
    async with allocator_of(machines(4, 2, **BIG), FRONT) as allocator:
        spec = a_job(3, "b", together_with=near("a", Property.MSB))
        early = await allocator.place(spec)
        assert early.unplaced == (0, 1, 2)
        assert "8 free machines: not in the msb of a task of a" in early.reasons
        assert allocator.waiting.take_due() == []
        one = await allocator.place(a_job(1, "a"))
        assert allocator.waiting.take_due() == ["b"]
        late = await allocator.place(spec)
        assert late.unplaced == ()
        assert msbs(late) == msbs(one)
        again = await allocator.place(a_job(1, "a"))  # the task stays, so no job is woken
        assert hosts(again) == hosts(one)
        assert allocator.waiting.take_due() == []


async def test_placed_tasks_stay_when_a_related_job_comes():
    async with allocator_of(machines(1, 1, **BIG), FRONT) as allocator:
        one = await allocator.place(a_job(2, "a"))
        other = await allocator.place(a_job(1, "b", apart_from=near("a")))
        assert other.unplaced == (0,)
        assert hosts(await allocator.place(a_job(2, "a"))) == hosts(one)
        await allocator.forget("b")
        assert (await allocator.place(a_job(3, "a"))).unplaced == ()
        (claims,) = allocator.index.claims.values()
        assert {claim.demand.requires for claim in claims} == {()}


async def test_jobs_that_are_placed_at_the_same_time_keep_apart_too():
    async with allocator_of(machines(3, 3), FRONT) as allocator:
        names = "abcdef"
        specs = {
            name: a_job(4, name, apart_from=[Neighbour(job=o) for o in names if o < name])
            for name in names
        }
        made = await asyncio.gather(*(allocator.place(spec) for spec in specs.values()))
        there = defaultdict[str, set[str]](set)
        for name, allocation in zip(names, made, strict=True):
            for host in hosts(allocation):
                there[host].add(name)
        assert there
        assert all(len(jobs) == 1 for jobs in there.values())


@on(region_of("dc1/msb1", "dc1/msb2", "dc1/msb3"))
async def test_job_files_say_it_and_restart_nothing(w: World):
    await entitle(w, "front", 3)
    await w.cp.apply_job(job("a", 1, limits=SMALL))
    await w.cp.apply_job(job("b", 1, limits=SMALL, apart_from=near("a")))
    await asyncio.sleep(60)
    await w.cp.apply_job(job("a", 4, limits=SMALL))  # follows the rule of b
    await asyncio.sleep(60)
    assert len(hosts_of(w, "a")) == 4
    assert not set(hosts_of(w, "a").values()) & set(hosts_of(w, "b").values())
    version = (await w.cp.get_job("b")).record.version
    await w.cp.apply_job(job("b", 1, limits=SMALL, together_with=near("a", Property.REGION)))
    assert (await w.cp.get_job("b")).record.version == version


@pytest.mark.behaviour("FE4")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_all_contradictions_are_refused_at_once(w: World):
    await entitle(w, "front", 1)
    await entitle(w, "back", 1)
    await w.cp.apply_job(job("far", 1, "back", limits=SMALL))
    await w.cp.apply_job(job("b", 1, limits=SMALL, together_with=near("a")))
    wrong = job(
        "a", 1, apart_from=near("a") + near("far") + near("c"), together_with=near("b") + near("c")
    )
    with pytest.raises(InvalidInput) as refused:
        await w.cp.apply_job(wrong)
    assert {e.field: e.reason.split(";")[0] for e in refused.value.errors} == {
        "apart_from[0].job": "'a' is the job itself",
        "apart_from[1].job": "'far' runs in 'back'",
        "together_with[0].job": "'b' already waits for this job: only one of them can be first",
        "together_with[1].job": "apart_from also has 'c' with the same property",
    }


@pytest.mark.behaviour("BUG-AL29")
async def test_a_plan_does_not_change_the_recorded_neighbours():
    """The allocator recorded the neighbours of a mere plan."""
    async with allocator_of(machines(1, 1, **BIG), FRONT) as allocator:
        await allocator.place(a_job(1, "a", apart_from=near("b")))
        found = await allocator.plan(a_job(2, "a"))
        assert len(found.of) == 2
        assert (await allocator.place(a_job(1, "b"))).unplaced == (0,)


@pytest.mark.behaviour("BUG-AL29")
async def test_a_plan_obeys_what_the_planned_form_states_about_others():
    async with allocator_of(machines(1, 2, **BIG), FRONT) as allocator:
        (there,) = hosts(await allocator.place(a_job(1, "a", preferences=PACK)))
        found = await allocator.plan(a_job(1, "b", apart_from=near("a")))
        assert found.of[0].machine != there
        found = await allocator.plan(a_job(1, "b", together_with=near("a")))
        assert found.of[0].machine == there
        assert not (await allocator.place(a_job(1, "b"))).unplaced


@pytest.mark.behaviour("BUG-AL29")
async def test_recorded_neighbours_survive_a_restart_of_a_program():
    """A program without job records placed others on the machine after a restart."""
    async with MemoryStore() as store:
        await stocked(store, machines(1, 1, **BIG), FRONT)
        async with allocator_over(store) as allocator:
            await allocator.place(a_job(1, "a"))
            await allocator.place(a_job(1, "a", apart_from=near("b")))  # states the rule later
        async with allocator_over(store) as allocator:
            assert (await allocator.place(a_job(1, "b"))).unplaced == (0,)
            await allocator.place(a_job(1, "a"))
        async with allocator_over(store) as allocator:
            assert not (await allocator.place(a_job(1, "b"))).unplaced
            assert allocator.allocations.counts.stored == 1
