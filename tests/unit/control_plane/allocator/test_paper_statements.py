"""The paper's statements on its allocator, checked through the API that programs use."""

from collections import Counter

import pytest
from test_place import GIB, a_job, machines

from agent.api import Limits
from control_plane.allocator.standalone import allocator_of, allocator_over
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.policy import Overcommit
from control_plane.api.settings import PowerSettings, SchedulerSettings
from control_plane.broker.keys import prefix_of
from control_plane.store.bulk import put_all
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ENTITLEMENTS, encode


@pytest.mark.behaviour("AL13", "AL14", "SC9")
async def test_answers_after_an_event_are_cached_except_for_affected_jobs():
    """Every job asks after every event, as a region's schedulers do. A machine fails, one returns,
    a job grows, one ends.
    """
    region, jobs = machines(6, 20), 100
    async with allocator_of(region, {"front": EntitlementSpec(machines=120)}) as allocator:
        specs = {f"j{n}": a_job(4, f"j{n}") for n in range(jobs)}
        for spec in specs.values():
            await allocator.place(spec)
        counts = allocator.allocations.counts
        for event in range(12):
            name = f"j{event}"
            lost = allocator.index.claims[name].machines[0].name
            hit = {claims.job for claims in allocator.index.machines[lost].jobs}
            match event % 3:
                case 0:
                    await allocator.broker.carry_out(lost, MarkDown(reason="says the test"))
                case 1:
                    specs[name], hit = a_job(5, name), {name}
                case _:
                    await allocator.broker.carry_out(lost, MarkUp())
                    hit = set()
            before = counts.misses
            for spec in specs.values():
                await allocator.place(spec)
            assert counts.misses - before == len(hit)
            assert all(len(allocator.index.claims[job]) == s.tasks for job, s in specs.items())


@pytest.mark.behaviour("AL15")
async def test_a_thousand_jobs_of_36_tasks_are_placed_evenly():
    """Shows that the placement is possible; `tests/bench/placement.py` measures its speed."""
    region = machines(12, 200, cpus=64, rru=64.0, memory_bytes=400 * GIB)
    async with allocator_of(region, {"front": EntitlementSpec(machines=2400)}) as allocator:
        small = Limits(memory_max_bytes=GIB // 2, cpu_max_cores=0.5)
        for number in range(1000):
            made = await allocator.place(a_job(36, f"j{number}", limits=small))
            bins = Counter(claim.machine.place.msb for claim in made.claims or ())
            assert set(bins.values()) == {3}
        counts = allocator.allocations.counts
        assert (counts.misses, counts.stored, counts.conflicts) == (1000, 1000, 0)


@pytest.mark.behaviour("AL21")
@pytest.mark.parametrize(("overcommit", "fit"), [(1.0, 16), (2.0, 32)])
async def test_cpu_is_overcommitted_only_by_a_job_that_requests_it(overcommit, fit):
    """A job that does not state its CPU claims the default of a quarter of a core."""
    roomy = machines(1, 1, memory_bytes=100 * GIB)
    async with allocator_of(roomy, {"front": EntitlementSpec(machines=1)}) as allocator:
        limits = Limits(memory_max_bytes=GIB)
        spec = a_job(40, limits=limits, cpus=0.25, overcommit=Overcommit(cpu=overcommit))
        assert len((await allocator.place(spec)).claims or ()) == fit
        silent = a_job(40, "silent", limits=limits)
        assert not (await allocator.place(silent)).claims


@pytest.mark.behaviour("AL22")
async def test_more_is_placed_than_the_power_of_an_msb_would_bear():
    """Each machine may draw 800 W and the MSB supports 2 kW. By default it is overcommitted."""
    region = machines(1, 4, power_w=800)
    bears = SchedulerSettings(power=PowerSettings(budgets_w={"dc1/msb1": 2000}))
    quota = {"front": EntitlementSpec(machines=4)}
    async with allocator_of(region, quota, bears) as allocator:
        made = await allocator.place(a_job(16))
        assert len(made.unplaced) == 4
        (budget,) = allocator.index.power_budgets()
        assert (budget.budget_w, budget.limit_w, budget.used_w) == (2000, 2500, 2400)
        assert any("power: dc1/msb1 has 100 W left" in reason for reason in made.reasons)
    async with allocator_of(region, quota) as allocator:
        assert not (await allocator.place(a_job(16))).unplaced


@pytest.mark.behaviour("AL12", "AL22")
async def test_budgets_of_power_hold_after_a_restart_and_free_up_with_their_job():
    region = machines(1, 4, power_w=800)
    bears = SchedulerSettings(power=PowerSettings(budgets_w={"dc1": 1600}, overcommit=1.0))
    async with MemoryStore() as store:
        await put_all(store, ((prefix_of("dc1") + m.machine, encode(m)) for m in region))
        front = EntitlementRecord(name="front", spec=EntitlementSpec(machines=4))
        await put_all(store, [(ENTITLEMENTS + "front", encode(front))])
        async with allocator_over(store, settings=bears) as allocator:
            assert not (await allocator.place(a_job(8))).unplaced
        async with allocator_over(store, settings=bears) as allocator:
            assert [b.used_w for b in allocator.index.power_budgets()] == [1600]
            assert len((await allocator.place(a_job(1, "more"))).unplaced) == 1
            await allocator.forget("web")
            assert not (await allocator.place(a_job(1, "more"))).unplaced
            assert [b.used_w for b in allocator.index.power_budgets()] == [800]


@pytest.mark.behaviour("AL24")
async def test_the_allocator_counts_its_work_and_computing_time():
    async with allocator_of(machines(), {"front": EntitlementSpec(machines=6)}) as allocator:
        counts = allocator.allocations.counts
        assert (counts.misses, counts.cpu_s) == (0, 0.0)
        await allocator.place(a_job(6))
        spent = counts.cpu_s
        assert spent > 0
        await allocator.place(a_job(6))
        assert (counts.hits, counts.misses, counts.stored, counts.taken) == (1, 1, 1, 3)
        assert counts.cpu_s == spent  # a cached answer needs no plan


async def test_nothing_outlives_an_allocator_in_memory():
    async with MemoryStore() as store, allocator_over(store) as allocator:
        assert not allocator.index.machines
