"""`job plan` predicts the effects of `job apply`; `job explain` reports why tasks wait."""

import asyncio
import itertools
import json
from collections import Counter

import pytest
from allocating import TASK, a_request
from fake_agents import IMAGE_2
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from regions import a_region as an_index
from regions import state
from test_growing_and_shrinking import MIB, entitle, held, hosts, job, on, region_of
from virtual_time import run
from world import World

from agent.api import Limits, ProfileState
from control_plane.allocator.core.region_index import STEP
from control_plane.allocator.core.request import Allowance
from control_plane.allocator.transactions import Allocations
from control_plane.api.inventory import Drain
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import MachineState
from control_plane.api.plans import JobPlan
from control_plane.api.policy import Admission, Preference, Property, Strategy
from control_plane.runtime import runtime
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from wire.errors import InvalidInput, NotFound, QuotaExceeded
from wire.routes import decode_json

pytestmark = pytest.mark.behaviour("MO8", "SH5")

PLACES = ("dc1/msb1", "dc1/msb2", "dc1/msb2", "dc2/msb3", "dc2/msb4")
MEMORY = st.sampled_from([100, 250, 400, 600])
PREFERENCES = st.sampled_from(
    [
        None,
        [],
        [Preference(property=Property.MSB, strategy=Strategy.PACK)],
        [Preference(property=Property.MACHINE, strategy=Strategy.EVEN, at_most=1)],
        [Preference(property=Property.DATACENTER, strategy=Strategy.PREFER, values=["dc2"])],
    ]
)
JOBS_APPLIED = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["a", "b"]),
            "tasks": st.integers(0, 5),
            "memory": MEMORY,
            "image": st.sampled_from(["", IMAGE_2]),
            "preferences": PREFERENCES,
            "admission": st.sampled_from(list(Admission)),
        }
    ),
    min_size=1,
    max_size=5,
)


def spec_of(job_fields: dict):
    fields = {k: v for k, v in job_fields.items() if k not in ("memory", "image", "name", "tasks")}
    if job_fields["image"]:
        fields["image"] = job_fields["image"]
    limits = Limits(memory_max_bytes=job_fields["memory"] * MIB)
    return job(job_fields["name"], job_fields["tasks"], limits=limits, **fields)


def claims(w: World, name: str) -> dict[int, str]:
    found = w.cp._allocator.index.claims.get(name)
    return {c.task: c.machine.name for c in found} if found is not None else {}


async def settled(w: World) -> None:
    """Wait until nothing changes any more; tasks without room continue to wait."""
    await asyncio.sleep(150)


async def plan_and_apply(w: World, spec) -> None:
    before, machines = claims(w, spec.name), set(held(w, "front"))
    others_wait = [r for r in w.cp._allocator.waiting.requests() if r.job != spec.name]
    revision, index = w.store._revision, state(w.cp._allocator.index)
    try:
        planned = await w.cp.job_planner.plan(spec)
    except (InvalidInput, QuotaExceeded) as refused:
        with pytest.raises(type(refused), match=str(refused)[:40]):
            await w.cp.apply_job(spec)
        return
    assert (w.store._revision, state(w.cp._allocator.index)) == (revision, index)
    await w.cp.apply_job(spec)
    await settled(w)
    compare(planned, before, claims(w, spec.name))
    taken = set(held(w, "front")) - machines
    assert set(planned.taken) <= taken
    if not others_wait:  # they may take machines that this job left
        assert taken == set(planned.taken)
    status = await w.cp.get_job(spec.name)
    assert status.healthy == planned.wanted - len(planned.unplaced)


def compare(planned: JobPlan, before: dict[int, str], after: dict[int, str]) -> None:
    expected = {t: m for t, m in before.items() if t not in planned.stopped}
    expected |= {task.task: task.machine for task in planned.placed}
    assert after == expected
    assert {t.task: t.moved_from for t in planned.placed if t.moved_from} == {
        t: before[t] for t in expected if t in before and before[t] != expected[t]
    }
    assert sum(b.tasks for b in planned.spread) == len(after)
    assert planned.staying == len([t for t in after if before.get(t) == after[t]])


@pytest.mark.behaviour("MO8")
@settings(deadline=None, max_examples=30)
@given(JOBS_APPLIED)
def test_a_plan_is_what_applying_then_does(jobs_applied):
    async def main() -> None:
        w = World(region_of(*PLACES), give_back_after_s=100_000, repair_after_s=100_000)
        async with w.running():
            for machine in w.region.machines.values():
                await w.cp.joined(machine.join())
            await entitle(w, "front", 4)
            await w.until(w.all_answer)
            known: dict[str, dict] = {}
            for job_fields in jobs_applied:
                # the result of a rolling change of size depends on the room in between
                job_fields["memory"] = known.get(job_fields["name"], job_fields)["memory"]
                known[job_fields["name"]] = job_fields
                await plan_and_apply(w, spec_of(job_fields))
        assert w.region.broken_rules == []

    run(main())


# -- why tasks wait


@pytest.mark.behaviour("BUG-UX7")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc2/msb3"))
async def test_all_reasons_are_named_at_once_and_per_group_of_machines(w: World):
    await entitle(w, "front", 3)
    await entitle(w, "back", 1)
    await w.cp.apply_job(job("a", 3))
    await w.stable("a")
    leaves = hosts(w, "a")["a-0"]
    await w.cp.apply_job(job("b", 3))
    await asyncio.sleep(5)
    explained = await w.cp.job_planner.explain("b")
    assert (explained.wanted, explained.placed, explained.waiting) == (3, 0, [0, 1, 2])
    assert explained.reasons == [
        "3 machines: memory: 600 MiB wanted, at most 296 MiB free",
        "1 free machine: the quota of machines is used up",
    ]
    assert explained.summary == "0 of 3 placed; 3 wait: " + ", ".join(explained.reasons)
    assert (explained.fitting_held, explained.fitting_free) == (0, 0)
    await w.cp.inventory.drain(Drain(machines=[leaves], reason="new fans", start_in_s=1800))
    explained = await w.cp.job_planner.explain("b")
    assert "1 machine: will be taken for maintenance: new fans" in explained.reasons
    assert "3 machines: memory: 600 MiB wanted, at most 296 MiB free" in explained.reasons
    note = "of 3 machines in all: each counts once per reason"
    assert explained.reasons.count(note) == 1
    explained = await w.cp.job_planner.explain("a")
    assert (explained.summary, explained.reasons) == ("3 of 3 placed", [])
    assert sum(b.tasks for b in explained.spread) == 3
    with pytest.raises(NotFound):
        await w.cp.job_planner.explain("none")


@pytest.mark.behaviour("BUG-UX112")
@on(region_of("dc1/msb1"))
async def test_a_task_that_claims_another_amount_where_it_is_stays(w: World):
    """The plan reported tasks on the same machine as new."""
    await entitle(w, "front", 1)
    before, after = (Limits(memory_max_bytes=size * MIB) for size in (100, 200))
    await w.cp.apply_job(job("a", 2, limits=before))
    await w.stable("a")
    planned = await w.cp.job_planner.plan(job("a", 2, limits=after))
    assert (planned.placed, planned.staying, planned.new_version) == ([], 2, True)


@pytest.mark.behaviour("BUG-UX121")
@on(region_of(*PLACES))
async def test_tasks_that_claim_another_amount_swap_no_machines(w: World):
    """The plan swapped the machines of all tasks; the update kept them."""
    await entitle(w, "front", 4)
    before, after = (Limits(memory_max_bytes=size * MIB) for size in (100, 600))
    await w.cp.apply_job(job("a", 4, limits=before))
    await w.stable("a")
    placed = claims(w, "a")
    assert len(set(placed.values())) == 4
    planned = await w.cp.job_planner.plan(job("a", 4, limits=after))
    assert (planned.placed, planned.staying, planned.new_version) == ([], 4, True)
    await w.cp.apply_job(job("a", 4, limits=after))
    await w.stable("a")
    assert claims(w, "a") == placed


@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_limits_of_preferences_and_gangs_are_reasons(w: World):
    await entitle(w, "front", 3)
    at_most = [Preference(property=Property.MSB, strategy=Strategy.EVEN, at_most=1)]
    small = Limits(memory_max_bytes=100 * MIB)
    await w.cp.apply_job(job("a", 5, limits=small, preferences=at_most))
    await asyncio.sleep(5)
    explained = await w.cp.job_planner.explain("a")
    assert (explained.placed, explained.waiting) == (3, [3, 4])
    assert any("msb would get 2 tasks > 1" in reason for reason in explained.reasons)
    gang = Admission.GANG
    await w.cp.apply_job(job("l", 1))
    await w.stable("l")
    await w.cp.apply_job(job("g", 3, admission=gang))
    await asyncio.sleep(5)
    explained = await w.cp.job_planner.explain("g")
    assert explained.placed == 0
    assert "all or nothing was requested, and 1 lack room" in explained.summary


@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_a_returned_place_counts_as_uneven(w: World):
    """A machine that was down for long is free when it is back; its job is still uneven."""
    await entitle(w, "front", 3)
    await w.cp.apply_job(job("a", 6, limits=Limits(memory_max_bytes=100 * MIB)))
    await w.stable("a")
    w.region.machines["m2"].power_off()
    await w.until(lambda: "m2" not in held(w, "front"))
    await w.stable("a")
    w.region.machines["m2"].power_on()
    await w.until(lambda: w.cp._broker.table.get("m2").state is MachineState.UP)
    await asyncio.sleep(5)
    explained = await w.cp.job_planner.explain("a")
    assert "dc1/msb1 has 3 tasks and dc1/msb2 has 0" in explained.uneven
    await w.until(lambda: Counter(hosts(w, "a").values()) == {"m1": 2, "m2": 2, "m3": 2}, 600)
    await w.stable("a")
    assert (await w.cp.job_planner.explain("a")).uneven == ""


@pytest.mark.behaviour("HP15")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_no_task_leaves_for_a_free_machine_before_that_proved_its_profile(w: World):
    """The task left to improve the spread, and was down during the whole switch."""
    await entitle(w, "front", 3)
    await w.cp.apply_job(job("a", 6, limits=Limits(memory_max_bytes=100 * MIB)))
    await w.stable("a")
    w.region.machines["m2"].power_off()
    await w.until(lambda: "m2" not in held(w, "front"))
    await w.stable("a")
    m2 = w.region.machines["m2"]
    m2.behaviour.switch_s = 300.0  # longer than an idle machine is kept
    m2.power_on()
    moved = list[str]()

    async def is_even() -> bool:
        away = 6 - sum(1 for task in w.cp._jobs.get("a").tasks if task.listed)
        if away and m2.profile.state is not ProfileState.VERIFIED:
            moved.append(m2.profile.state)
        return Counter(hosts(w, "a").values()) == {"m1": 2, "m2": 2, "m3": 2}

    await w.until(lambda: "m2" in held(w, "front"))
    await w.until(is_even, 900)
    await w.stable("a")
    assert not moved


@pytest.mark.behaviour("HP15")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_a_machine_taken_without_a_use_is_returned(w: World):
    """Its job was removed before the machine proved the profile."""
    await entitle(w, "front", 3)
    await w.cp.apply_job(job("a", 6, limits=Limits(memory_max_bytes=100 * MIB)))
    await w.stable("a")
    w.region.machines["m2"].power_off()
    await w.until(lambda: "m2" not in held(w, "front"))
    await w.stable("a")
    m2 = w.region.machines["m2"]
    m2.behaviour.switch_s = 3000.0
    m2.power_on()
    await w.until(lambda: "m2" in held(w, "front"))
    await w.cp.stop_job("a")
    await w.until(lambda: not held(w, "front"), 1200)


# -- the largest jobs


class EveryStep(SteppedRuntime):
    """Yields to other coroutines at every checkpoint."""

    STEPS = 1


@pytest.mark.behaviour("SH5", "AL17")
async def test_the_largest_job_never_keeps_others_from_their_turn():
    """The measure is turns of the loop, not time: 15,000 tasks in steps of at most 500."""
    async with MemoryStore() as store:
        index = an_index(5, 12, 70, pool="front")
        allocations = Allocations(store, index, NoBrokers(), runtime=EveryStep(lambda: 0.0, 0))
        turns, steps = 0, []

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                steps.append(sum(len(m.jobs) for m in index.machines.values()))
                await asyncio.sleep(0)

        concurrent = asyncio.create_task(others())
        got = await allocations.allocate(a_request(15_000, demand=TASK), Allowance)
        assert got.unplaced == ()
        assert turns > 2 * 15_000 / STEP
        grown = [after - before for before, after in itertools.pairwise(steps)]
        assert max(grown) <= STEP
        before = turns
        assert (await allocations.allocate(a_request(15_000), Allowance)).unplaced == ()
        assert allocations.counts.hits == 1
        await allocations.allocate(a_request(0), Allowance)
        assert turns - before > 15_000 / STEP
        concurrent.cancel()
        assert index.claims == {}


@pytest.mark.behaviour("FE1")
@on(region_of(*PLACES))
async def test_reports_of_large_jobs_are_computed_outside_the_loop(w: World):
    """The report equals that of a small job. The test lowers the size from which a job is large."""
    await entitle(w, "front", 5)
    await w.cp.apply_job(job("a", 3, limits=Limits(memory_max_bytes=100 * MIB)))
    await w.stable("a")
    before = await w.cp.job_planner.explain("a"), await w.cp.intents.show("a")
    with pytest.MonkeyPatch.context() as patch:
        concurrent, offload = set[str](), w.cp._runtime.offload

        async def noted(work, *args):
            concurrent.add(work.__name__)
            return await offload(work, *args)

        patch.setattr(runtime, "LARGE", 1)
        patch.setattr(w.cp._runtime, "offload", noted)
        assert (await w.cp.job_planner.explain("a"), await w.cp.intents.show("a")) == before
    assert concurrent >= {"_places", "remaining_tasks", "next_to_move", "volume_notes", "_effects"}


class NoBrokers:
    """Brokers for plans that take no machines."""


@pytest.mark.behaviour("SH5", "BUG-AU5")
def test_a_job_has_at_most_as_many_tasks_as_a_shard_takes():
    """A job of 15,000 tasks is decoded; one more task is refused."""
    text = {"name": "a", "entitlement": "front", "image": f"sha256:{'0' * 64}", "command": ["/x"]}
    made = decode_json(json.dumps(text | {"tasks": 15_000}).encode(), JobSpec, "the job")
    assert made.tasks == 15_000
    with pytest.raises(InvalidInput) as refused:
        decode_json(json.dumps(text | {"tasks": 15_001}).encode(), JobSpec, "the job")
    assert "15000" in str(refused.value.errors)
    assert "tasks" in str(refused.value.errors)


@pytest.mark.behaviour("BUG-UX115")
@on(region_of("dc1/msb1"))
async def test_a_job_larger_than_its_entitlement_is_refused(w: World):
    """`job apply` exited with 64 (wrong use) instead of 5 (over quota)."""
    await entitle(w, "front", 1)
    small = Limits(memory_max_bytes=1 << 20)
    wanted = job("a", 15_000, limits=small)
    for ask in (w.cp.job_planner.plan, w.cp.apply_job):
        with pytest.raises(
            QuotaExceeded, match="15000 tasks do not fit on the entitlement's 1 machines"
        ) as refused:
            await ask(wanted)
        assert refused.value.exit_code == 5


@pytest.mark.behaviour("BUG-UX115")
@on(region_of("dc1/msb1"))
async def test_both_errors_of_an_invalid_job_over_quota_are_reported(w: World):
    """With an error in the file the exit code stays 64, and all errors are listed."""
    await entitle(w, "front", 1)
    wanted = job("a", 15_000, limits=Limits(memory_max_bytes=1 << 20))
    with pytest.raises(InvalidInput) as refused:
        await w.cp.apply_job(replace(wanted, runtime="r"))
    assert {error.field for error in refused.value.errors} == {"runtime", "tasks"}
