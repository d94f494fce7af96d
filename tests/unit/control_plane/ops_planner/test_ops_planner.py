"""Plans in the assembled control plane on virtual time. Owners of jobs do nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pytest
from fake_agents import Region
from virtual_time import clock, run
from world import World, a_job

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import UpdatePolicy
from control_plane.api.machines import MachineState
from control_plane.api.maintenance import (
    Ends,
    GoOn,
    MaintenanceRequest,
    PlanState,
    WaveState,
    Within,
    Work,
)
from control_plane.broker.core.unavailability import leaving
from control_plane.ops_planner import planner, preview
from control_plane.store import Delete, Operation, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import PLANS, QUARANTINE, WAVES
from wire.errors import Busy, Conflict, InvalidInput, NotFound

LARGE = Limits(memory_max_bytes=700 << 20)
"""One task fills a machine."""
QUICK = UpdatePolicy(max_unavailable=1, drain_s=1)


def a_region(machines: int, msbs: int = 3) -> Region:
    region = Region()
    for number in range(machines):
        msb = number % msbs
        region.add(f"m{number + 1}", "dc1", f"msb{msb + 1}")
    return region


def planned(machines: int = 6, **settings):
    """Run the body on a region of this number of machines. No rule may be broken in it."""

    def decorate(body):
        def test() -> None:
            async def main() -> None:
                world = World(a_region(machines), give_back_after_s=20, **settings)
                async with asyncio.timeout(50_000):
                    async with world.running():
                        await body(world)
                assert world.region.broken_rules == []

            run(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def a_request(**changes) -> MaintenanceRequest:
    values = {"reason": "6.12.9", "work": Work.KERNEL, "scope": MachineScope(datacenter="dc1")}
    return MaintenanceRequest(**(values | changes))


class Hands:
    """Does the work on machines that a plan reports as ready, and counts."""

    def __init__(self, w: World, plan: str, breaks: frozenset[str] = frozenset()) -> None:
        self.w, self.plan, self.breaks = w, plan, breaks
        self.upgraded: list[str] = []
        self.taken_together: list[set[str]] = []
        """Sets of machines that were under work at the same time."""
        self.least = 10**6

    async def work(self) -> None:
        while True:
            serving = len((await self.w.cp.endpoints("web")).endpoints)
            self.least = min(self.least, serving)
            for wave in self.w.cp.maintenance.show(self.plan).waves:
                new = [m for m in wave.ready if m not in self.upgraded]
                if new:
                    self.taken_together.append(set(new))
                for name in new:
                    machine = self.w.region.machines[name]
                    machine.power_off()
                    self.upgraded.append(name)
                    if name not in self.breaks:
                        asyncio.get_running_loop().call_later(40, machine.power_on)
            await asyncio.sleep(0.2)


async def state(w: World, plan: str) -> PlanState:
    return w.cp.maintenance.show(plan).plan.state


@pytest.mark.behaviour("HC4", "HC5", "HC7", "SC2")
@planned()
async def test_a_fleet_gets_its_kernel_in_waves_of_one_msb(w: World):
    """Tasks leave, machines boot, and the next wave waits for both."""
    await w.deployed(a_job(4, limits=LARGE, update=QUICK), quota=6)
    request = a_request(wave_size=1, within=Within.MSB, deadline_s=600.0, duration_s=120.0)
    preview = await w.cp.maintenance.preview("kernel", request)
    assert preview.waves == [1] * 6
    assert preview.warnings == []
    assert [(job.job, job.there, job.budget) for job in preview.jobs] == [("web", 4, 1)]
    await w.cp.maintenance.accept("kernel", request, "ann")
    hands = Hands(w, "kernel")
    working = asyncio.create_task(hands.work())
    await w.until(lambda: w.cp.maintenance.show("kernel").plan.ended, within_s=9000)
    working.cancel()
    assert sorted(hands.upgraded) == sorted(w.region.machines)
    assert all(len(together) == 1 for together in hands.taken_together)
    assert hands.least >= 3
    await w.stable()
    view = w.cp.maintenance.show("kernel")
    assert (view.plan.state, view.done) == (PlanState.DONE, 6)
    events = (await w.cp.job_events("web", 0, 500)).events
    assert {e.cause for e in events if e.kind == "move"} == {"maintenance"}


@pytest.mark.behaviour("HC5")
@planned()
async def test_a_wave_that_does_not_return_healthy_pauses_the_plan(w: World):
    """No second MSB is affected. An operator may continue the plan without a machine."""
    await w.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
    request = a_request(
        wave_size=2,
        within=Within.MSB,
        deadline_s=300.0,
        duration_s=60.0,
        return_within_s=120.0,
        despite=True,
    )
    await w.cp.maintenance.accept("kernel", request, "ann")
    first = set(w.cp.maintenance._waves_of(w.cp.maintenance._plans.get("kernel"))[0].machines)
    broken = sorted(first)[0]
    hands = Hands(w, "kernel", frozenset({broken}))
    working = asyncio.create_task(hands.work())

    async def is_paused() -> bool:
        return await state(w, "kernel") is PlanState.PAUSED

    await w.until(is_paused, within_s=2000)
    await asyncio.sleep(3000)
    view = w.cp.maintenance.show("kernel")
    assert view.plan.detail == f"wave 1: 1 of 2 machines are not back: {broken}"
    assert [wave.state for wave in view.waves] == [WaveState.ANNOUNCED] + [WaveState.WAITING] * 2
    assert set(hands.upgraded) == first
    shown = await w.cp.maintenance.continue_plan("kernel", GoOn(without=True))
    assert shown.plan.name == "kernel"
    await w.until(lambda: w.cp.maintenance.show("kernel").plan.ended, within_s=9000)
    working.cancel()
    view = w.cp.maintenance.show("kernel")
    assert (view.done, view.waves[0].left_out) == (5, 1)


class SlowStore(MemoryStore):
    """A store whose writes take 10 ms, like those of etcd."""

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        await asyncio.sleep(0.01)
        return await super().txn(compare, operations)


@pytest.mark.behaviour("BUG-CP152")
def test_a_plan_that_is_continued_while_it_is_cancelled_has_no_open_wave():
    """Formerly the record of a wave, read before the cancellation, replaced the ended one."""

    async def main() -> None:
        world = World(a_region(6), SlowStore(strict=True))
        async with world.running():
            plans = world.cp.maintenance
            await world.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
            for number in range(12):
                name = f"kernel-{number}"
                request = a_request(wave_size=2, within=Within.MSB, despite=True)
                await plans.accept(name, request, "ann")
                cancelling = asyncio.create_task(plans.cancel(name))
                await asyncio.sleep(0.005 * number)
                with suppress(Conflict):
                    await plans.continue_plan(name, GoOn(without=True))
                await cancelling
                states = {wave.state for wave in plans.show(name).waves}
                assert not states & {WaveState.ANNOUNCED, WaveState.WAITING}, states

    run(main())


@pytest.mark.behaviour("BUG-CP140")
@planned()
async def test_a_machine_that_a_plan_left_out_is_drained_until_it_is_back_or_reported(w: World):
    """The plan continues without two machines. One is back while it runs, the other later."""
    await w.deployed(a_job(1, limits=LARGE, update=QUICK), quota=6)
    request = a_request(
        wave_size=2, within=Within.MSB, deadline_s=300.0, return_within_s=120.0, despite=True
    )
    plans = w.cp.maintenance
    await plans.accept("kernel", request, "ann")
    early, late = sorted(plans._waves_of(plans._plans.get("kernel"))[0].machines)
    working = asyncio.create_task(Hands(w, "kernel", frozenset({early, late})).work())

    async def is_paused() -> bool:
        return await state(w, "kernel") is PlanState.PAUSED

    def is_drained(name: str) -> bool:
        return leaving(w.cp._broker.table.get(name), w.cp._runtime.date())

    await w.until(is_paused, within_s=2000)
    await plans.continue_plan("kernel", GoOn(without=True))
    w.region.machines[early].power_on()
    await w.until(lambda: not is_drained(early), within_s=300)
    await w.until(lambda: plans.show("kernel").plan.ended, within_s=9000)
    working.cancel()
    w.region.machines[late].power_on()
    await w.stable()
    assert is_drained(late)
    await plans.report("kernel", [late])
    assert not is_drained(late)


def test_a_plan_continues_after_a_restart():
    """Waves are stored before they are announced, and none is announced twice."""
    region, store, events = a_region(6), MemoryStore(strict=True), {}
    request = a_request(
        wave_size=2, within=Within.MSB, deadline_s=300.0, duration_s=60.0, despite=True
    )

    async def before() -> None:
        world = World(region, store)
        async with world.running():
            await world.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
            await world.cp.maintenance.accept("kernel", request, "ann")
            for name in region.machines:
                events[name] = world.cp._broker.table.get(name).unavailability

    async def after() -> None:
        world = World(region, store)
        async with world.running():
            await world.until(world.all_answer)
            await asyncio.sleep(30)
            for name in region.machines:
                assert world.cp._broker.table.get(name).unavailability == events[name]
            hands = Hands(world, "kernel")
            working = asyncio.create_task(hands.work())
            await world.until(lambda: world.cp.maintenance.show("kernel").plan.ended, 9000)
            working.cancel()
            assert sorted(hands.upgraded) == sorted(region.machines)

    async def main() -> None:
        await before()
        await after()

    run(main())
    assert region.broken_rules == []


@pytest.mark.behaviour("HC4")
@planned()
async def test_consequences_are_shown_and_a_plan_without_room_is_refused(w: World):
    """A plan that would leave tasks without a machine is announced only with `despite`."""
    await w.deployed(a_job(6, limits=LARGE, update=QUICK), quota=6)
    request = a_request(scope=MachineScope(msb="msb1"), deadline_s=60.0)
    preview = await w.cp.maintenance.preview("room", request)
    (job,) = preview.jobs
    assert (job.there, job.tasks, job.unplaced, job.rounds) == (2, 6, 2, 2)
    assert preview.at_once == 1  # the job's budget is one task
    assert [held.jobs for held in preview.held] == [["web"]]
    assert len(preview.warnings) == 2  # no machine for the tasks, and a third of the region
    with pytest.raises(Conflict, match="plan room is not accepted: a wave takes 33%"):
        await w.cp.maintenance.accept("room", request, "ann")
    assert w.cp.maintenance.list_plans() == []
    assert all(not r.unavailability for r in w.cp._broker.table.records())
    request = a_request(scope=MachineScope(msb="msb1"), deadline_s=60.0, despite=True)
    await w.cp.maintenance.accept("room", request, "ann")
    assert w.cp.maintenance.show("room").plan.by == "ann"


@planned()
async def test_a_preview_moves_nothing_and_takes_no_room(w: World):
    await w.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
    index = w.cp._allocator.index
    before = {m.name: (m.free_cpu, m.free_memory, m.pool) for m in index.machines.values()}
    for _ in range(3):
        preview = await w.cp.maintenance.preview("p", a_request(wave_size=2, within=Within.MSB))
        assert preview.tasks == 2
    after = {m.name: (m.free_cpu, m.free_memory, m.pool) for m in index.machines.values()}
    assert after == before
    await w.stable()


@pytest.mark.behaviour("SC6")
@planned()
async def test_two_plans_for_one_machine_are_both_kept_and_the_earlier_deadline_counts(w: World):
    """Overlapping events share one budget, and each plan reports the other one."""
    await w.deployed(a_job(3, limits=LARGE, update=QUICK), quota=6)
    host = next(m for m, tasks in w.region.where().items() if tasks)
    kernel = a_request(scope=None, machines=[host], deadline_s=3600.0, start_in_s=60.0)
    switch = a_request(
        scope=None, machines=[host], work=Work.SWITCH, deadline_s=600.0, start_in_s=60.0
    )
    await w.cp.maintenance.accept("kernel", kernel, "ann")
    preview = await w.cp.maintenance.preview("switch", switch)
    assert preview.conflicts == [
        f"plan kernel: it also has 1 of these machines ({host}); tasks leave once, by the"
        " earlier deadline"
    ]
    await w.cp.maintenance.accept("switch", switch, "bob")
    open_events = w.cp._broker.table.get(host).unavailability
    assert {event.plan for event in open_events} == {"kernel", "switch"}
    await asyncio.sleep(61)
    record = w.cp._broker.table.get(host)
    view = w.cp._observations.view({"front": "front"}, [record.machine], clock())
    assert view[host].departure.deadline == min(e.deadline for e in open_events)
    await w.until(lambda: not w.region.where()[host], within_s=600)
    await w.cp.maintenance.cancel("switch")
    (left,) = [e for e in w.cp._broker.table.get(host).unavailability if e.end is None]
    assert left.plan == "kernel"


@pytest.mark.behaviour("SC6")
@planned(9)
async def test_of_two_machines_the_one_with_the_earlier_deadline_is_left_first(w: World):
    """Both events share one budget. Their deadlines give the order."""
    await w.deployed(a_job(3, limits=LARGE, update=QUICK), quota=9)
    at = {t.index: t.placement.machine for t in w.cp._jobs.get("web").tasks}
    late = a_request(scope=None, machines=[at[0]], deadline_s=7200.0)
    soon = a_request(scope=None, machines=[at[2]], deadline_s=900.0, work=Work.REPAIR)
    await asyncio.gather(
        w.cp.maintenance.accept("late", late, "ann"), w.cp.maintenance.accept("soon", soon, "ann")
    )
    await w.until(lambda: not w.region.where()[at[0]] and not w.region.where()[at[2]], 900)
    await w.stable()
    moves = [e for e in (await w.cp.job_events("web", 0, 500)).events if e.kind == "move"]
    assert sorted(e.task for e in moves) == [0, 2]
    assert moves[0].task == 2 or moves[0].start < moves[1].start


@pytest.mark.behaviour("HC8", "HC14", "RB11")
@planned(24)
async def test_a_quarter_of_a_data_center_is_refreshed_and_owners_do_nothing(w: World):
    """Tasks move away, and machines of the free pool replace the old ones."""
    await w.deployed(a_job(12, limits=LARGE, update=QUICK), quota=12)
    old = sorted(w.region.machines, key=lambda m: int(m[1:]))[:6]
    request = a_request(
        scope=None, machines=old, work=Work.REFRESH, wave_size=2, reason="new racks"
    )
    assert (await w.cp.maintenance.preview("refresh", request)).warnings == []
    await w.cp.maintenance.accept("refresh", request, "ann")
    least = 12
    while not w.cp.maintenance.show("refresh").plan.ended:
        least = min(least, len(await w.endpoints()))
        await asyncio.sleep(0.5)
    assert least >= 11
    await w.stable()
    assert not [m for m in old if w.region.where()[m]]
    records = [w.cp._broker.table.get(m) for m in old]
    assert all(not record.entitlement for record in records)
    for name in old:  # the machines leave the building
        await w.cp.inventory.remove(name)


@pytest.mark.behaviour("SC2", "HC13", "WH10")
@planned(8)
async def test_when_power_is_short_what_matters_least_leaves_first_and_no_more_than_needed(
    w: World,
):
    """An MSB's power event needs no manual work."""
    for machine in w.region.machines.values():
        await w.cp.joined(machine.join())
    for name, priority in (("front", 900), ("batch", 100)):
        await w.cp.capacity.put_entitlement(
            name, EntitlementSpec(machines=4, host_profile="web", priority=priority)
        )
    await w.cp.apply_job(a_job(2, limits=LARGE, update=QUICK))
    await w.cp.apply_job(a_job(2, name="crunch", entitlement="batch", limits=LARGE, update=QUICK))
    await w.stable("web")
    await w.stable("crunch")
    where = w.region.where()
    capped = sorted(m for m, tasks in where.items() if tasks)
    request = a_request(
        scope=None,
        machines=capped,
        work=Work.POWER_CAP,
        reason="feed B lost",
        deadline_s=3600.0,
        despite=True,
    )
    preview = await w.cp.maintenance.preview("cap", request)
    assert preview.waves == [2, 2]
    await w.cp.maintenance.accept("cap", request, "ann")
    first = w.cp.maintenance._waves_of(w.cp.maintenance._plans.get("cap"))[0].machines
    assert all(where[m][0].startswith("crunch-") for m in first)
    web = {m for m in capped if where[m][0].startswith("web-")}
    while any(w.region.where()[m] for m in first):
        assert all(w.region.where()[m] for m in web)
        await asyncio.sleep(0.5)
    await w.until(lambda: not any(w.region.where()[m] for m in capped), within_s=600)
    causes = {e.cause for e in (await w.cp.job_events("crunch", 0, 100)).events if e.kind == "move"}
    assert causes == {"power"}
    await asyncio.sleep(60)
    assert await state(w, "cap") is PlanState.RUNNING  # until the power returns
    await w.cp.maintenance.cancel("cap")
    assert all(e.end is not None for m in capped for e in w.cp._broker.table.get(m).unavailability)


@pytest.mark.behaviour("TC9", "HC7")
@planned()
async def test_a_switch_outage_of_three_minutes_ends_without_help(w: World):
    """Tasks that stay are excused for the outage, and nothing needs a clean-up afterwards."""
    await w.set_up(6)
    request = a_request(
        scope=None,
        machines=["m1"],
        work=Work.SWITCH,
        deadline_s=120.0,
        duration_s=180.0,
        tasks_survive=True,
    )
    await w.cp.maintenance.accept("switch", request, "ann")
    await asyncio.sleep(121)
    assert w.cp.maintenance.show("switch").waves[0].ready == ["m1"]
    w.region.machines["m1"].reachable = False
    await asyncio.sleep(100)
    w.region.machines["m1"].reachable = True
    await asyncio.sleep(30)
    assert await state(w, "switch") is PlanState.RUNNING
    await w.until(lambda: w.cp.maintenance.show("switch").plan.ended, within_s=600)
    assert w.cp._broker.table.get("m1").state is MachineState.UP


@pytest.mark.behaviour("SC4")
@planned()
async def test_a_job_without_tasks_on_a_machine_is_not_concerned_by_its_maintenance(w: World):
    """A job with tasks there and without a controller moves them at once."""
    await w.deployed(a_job(2, limits=LARGE, update=QUICK), quota=3)
    await w.cp.capacity.put_entitlement("batch", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.apply_job(a_job(2, name="crunch", entitlement="batch", limits=LARGE))
    await w.stable("crunch")
    before = w.cp._jobs.get("crunch").tasks
    host = w.cp._jobs.get("web").tasks[0].placement.machine
    request = a_request(scope=None, machines=[host], work=Work.REPAIR)
    preview = await w.cp.maintenance.preview("fan", request)
    assert [job.job for job in preview.jobs] == ["web"]
    await w.cp.maintenance.accept("fan", request, "ann")
    await w.until(lambda: not w.region.where()[host], within_s=60)
    await w.stable()
    assert w.cp._jobs.get("crunch").tasks == before


@planned()
async def test_contradictory_input_is_refused_and_changes_nothing(w: World):
    await w.set_up(3)
    maintenance = w.cp.maintenance
    for changes, words in (
        ({"work": Work.REFRESH, "tasks_survive": True}, "tasks do not survive a refresh"),
        ({"tasks_survive": True}, "needs a deadline and a duration"),
        ({"ends": Ends.TIME}, "needs a deadline and a duration"),
        ({"shed_w": 10}, "only power-cap sheds power"),
    ):
        with pytest.raises(InvalidInput, match=words):
            await maintenance.preview("p", a_request(**changes))
    with pytest.raises(InvalidInput, match="is not a valid name of a plan"):
        await maintenance.accept("../x", a_request(), "ann")
    with pytest.raises(NotFound, match="no machine is in this scope"):
        await maintenance.accept("p", a_request(scope=MachineScope(msb="nowhere")), "ann")
    await maintenance.accept("p", a_request(despite=True), "ann")
    with pytest.raises(Conflict, match="there is already a plan 'p'"):
        await maintenance.accept("p", a_request(despite=True), "ann")
    with pytest.raises(NotFound, match="in no active wave"):
        await maintenance.report("p", ["unknown"])
    await maintenance.cancel("p")
    with pytest.raises(Conflict, match="is already cancelled"):
        await maintenance.cancel("p")


@planned()
async def test_work_ends_on_request(w: World):
    await w.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
    request = a_request(scope=None, machines=["m1", "m2"], work=Work.REPAIR, despite=True)
    await w.cp.maintenance.accept("fans", request, "ann")
    await w.until(lambda: len(w.cp.maintenance.show("fans").waves[0].ready) == 2)
    assert (await w.cp.maintenance.report("fans", ["m1"])).done == 1
    assert w.cp.maintenance.show("fans").done == 1
    w.region.machines["m2"].power_off()
    await w.until(lambda: not w.cp._observations.observation("m2").answering)
    assert (await w.cp.get_machine("m2")).record.state is MachineState.UP
    assert (await w.cp.maintenance.report("fans", ["m2"])).done == 1  # m2 does not answer
    w.region.machines["m2"].power_on()
    await w.until(lambda: w.cp.maintenance.show("fans").plan.ended)


@planned()
async def test_more_machines_than_one_plan_can_be_about_are_refused(w: World):
    await w.set_up(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "MACHINES_MAX", 5)
        with pytest.raises(InvalidInput, match="has 6 machines, more than 5"):
            await w.cp.maintenance.accept("kernel", a_request(despite=True), "ann")
        patch.setattr(planner, "MACHINES_MAX", 6)
        await w.cp.maintenance.accept("kernel", a_request(despite=True), "ann")


@planned()
async def test_a_preview_lists_some_jobs_and_counts_the_others(w: World):
    await w.deployed(a_job(2), quota=6)
    await w.cp.apply_job(a_job(2, name="other"))
    request = a_request(despite=True)
    while len((await w.cp.maintenance.preview("kernel", request)).jobs) < 2:
        await asyncio.sleep(1)
    assert (await w.cp.maintenance.preview("kernel", request)).more_jobs == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preview, "_JOBS_SHOWN", 1)
        shown = await w.cp.maintenance.preview("kernel", request)
    assert (len(shown.jobs), shown.more_jobs) == (1, 1)


@pytest.mark.behaviour("BUG-UX69")
@planned(1)
async def test_a_plan_is_not_shown_for_a_name_that_it_could_not_have(w: World):
    """Formerly `maintenance plan` accepted any name, and `apply` answered with a pattern."""
    request = a_request()
    for ask in (
        w.cp.maintenance.preview("k 2", request),
        w.cp.maintenance.accept("k 2", request, "me"),
    ):
        with pytest.raises(InvalidInput, match=r"'k 2' is not .* a plan: a-z, 0-9 and -, at most"):
            await ask


@pytest.mark.behaviour("BUG-UX106")
@planned()
async def test_a_cancelled_plan_still_shows_its_completed_work(w: World):
    """Formerly the plan showed 0 done, and its name was refused with "cancel it"."""
    await w.deployed(a_job(2, limits=LARGE, update=QUICK), quota=6)
    request = a_request(scope=None, machines=["m1", "m2"], work=Work.REPAIR, despite=True)
    await w.cp.maintenance.accept("fans", request, "ann")
    await w.until(lambda: len(w.cp.maintenance.show("fans").waves[0].ready) == 2)
    assert (await w.cp.maintenance.report("fans", ["m1"])).done == 1
    assert (await w.cp.maintenance.cancel("fans")).done == 1
    await w.until(lambda: w.cp._observations.observation("m2").answering)
    assert w.cp.maintenance.show("fans").done == 1
    with pytest.raises(Conflict, match="it is cancelled") as refused:
        await w.cp.maintenance.accept("fans", request, "ann")
    assert refused.value.hint == "the record of an ended plan keeps its name: choose another name"


class Failing(MemoryStore):
    """A store that accepts a number of writes, and then none."""

    left = 10**9

    async def txn(self, compare, operations) -> int:
        self.left -= 1
        if self.left < 0:
            raise Busy("the disk is gone")
        return await super().txn(compare, operations)


@pytest.mark.behaviour("BUG-CP96")
@pytest.mark.parametrize("wave_size", [0, 2])
@pytest.mark.parametrize("writes", range(6))
def test_a_cancellation_that_failed_is_completed(writes: int, wave_size: int):
    """Formerly the plan counted as cancelled, and its machines stayed drained for good."""

    async def main() -> None:
        w = World(a_region(6), Failing(strict=True))
        async with w.running():
            await w.set_up(quota=2)
            request = a_request(work=Work.REPAIR, wave_size=wave_size, despite=True)
            await w.cp.maintenance.accept("fans", request, "ann")
            w.store.left = writes
            with suppress(Busy):
                await w.cp.maintenance.cancel("fans")
            w.store.left = 10**9
            if not writes:
                assert await state(w, "fans") is PlanState.RUNNING
                await w.cp.maintenance.cancel("fans")
            await w.until(lambda: w.cp.maintenance.show("fans").plan.ended)
            view = w.cp.maintenance.show("fans")
            assert (view.plan.state, view.done) == (PlanState.CANCELLED, 0)
            assert {wave.state for wave in view.waves} == {WaveState.CANCELLED}
            records = w.cp._broker.table.records()
            assert [e for r in records for e in r.unavailability if e.end is None] == []
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP97")
@planned()
async def test_a_plan_with_the_name_of_a_dropped_one_is_announced(w: World):
    """Formerly the events of the earlier plan counted, so it was done before any work began."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "_ENDED_KEPT", 1)
        await w.set_up(quota=2)
        request = a_request(work=Work.REPAIR, wave_size=2, despite=True)
        for name in ("fans", "disks", "cables"):
            await w.cp.maintenance.accept(name, request, "ann")
            await w.cp.maintenance.cancel(name)
            await asyncio.sleep(10)
        view = await w.cp.maintenance.accept("fans", request, "ann")
        assert [wave.state for wave in view.waves][:1] == [WaveState.ANNOUNCED]
        await asyncio.sleep(60)
        view = w.cp.maintenance.show("fans")
        assert (view.plan.state, view.done) == (PlanState.RUNNING, 0)
        assert len(view.waves[0].ready) == 2


@pytest.mark.behaviour("BUG-CP135")
@pytest.mark.parametrize("damaged", [f"{PLANS}kernel", f"{WAVES}kernel/000001"])
def test_announcements_end_when_the_record_of_their_plan_is_damaged(damaged: str) -> None:
    """The record was set aside: no other record has the end of the work."""

    async def main() -> None:
        w = World(a_region(2), give_back_after_s=20)

        def are_announced() -> bool:
            records = [w.cp._broker.table.get(name) for name in ("m1", "m2")]
            return any(e.end is None for r in records for e in r.unavailability)

        async with asyncio.timeout(20_000):
            async with w.running():
                await w.set_up(2)
                await w.cp.maintenance.accept("kernel", a_request(despite=True), "ann")
                await w.until(are_announced, 100)
            await w.store.__aenter__()
            entry = await w.store.get(damaged)
            assert entry is not None
            aside = [Put(QUARANTINE + damaged, entry.value), Delete(damaged)]
            await w.store.txn({}, aside)
            await w.store.__aexit__(None, None, None)
            async with w.running():
                await w.until(lambda: not are_announced(), 300)

    run(main())


@planned(machines=2)
async def test_a_damaged_plan_keeps_what_ended_waves_announced(w: World):
    """Machines that were emptied to be removed stay announced after their wave."""
    await w.set_up(2)
    request = a_request(work=Work.DECOMMISSION, despite=True)
    await w.cp.maintenance.accept("old", request, "ann")
    await w.until(lambda: w.cp.maintenance.show("old").plan.state is PlanState.DONE, 300)
    w.cp.maintenance._damaged.add("old")
    async with w.cp.maintenance._plans.lock("old"):
        await w.cp.maintenance._plans.commit("old", None)
    await w.until(lambda: not w.cp.maintenance._damaged, 100)
    records = [w.cp._broker.table.get(name) for name in ("m1", "m2")]
    assert all(any(e.end is None for e in r.unavailability) for r in records)
