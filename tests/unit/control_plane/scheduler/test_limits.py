"""Limits on destructive actions, each in the component that enforces it, on virtual time."""

import asyncio

import pytest
from fake_agents import Region
from virtual_time import clock, run
from world import World, a_job

from agent.api import Limits as TaskLimits
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import UpdatePolicy
from control_plane.api.limits import LimitName, LimitView
from control_plane.api.machines import EventKind, MachineState
from control_plane.api.maintenance import MaintenanceRequest, Work
from control_plane.runtime.limits import Limit, LimitRegistry
from wire.errors import NotFound

LARGE = TaskLimits(memory_max_bytes=700 << 20)
SMALL = TaskLimits(memory_max_bytes=64 << 20)


def a_world(machines: int = 6, msbs: int = 3, **settings) -> World:
    region = Region()
    for number in range(machines):
        region.add(f"m{number + 1}", "dc1", f"msb{number % msbs + 1}")
    return World(region, **settings)


def limited(machines: int = 6, **settings):
    """Run the body on a region with `machines` machines, and assert that no rule was broken."""

    def decorate(body):
        def test() -> None:
            async def main() -> None:
                world = a_world(machines, **settings)
                async with asyncio.timeout(20_000):
                    async with world.running():
                        await body(world)
                assert world.region.broken_rules == []

            run(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def view(w: World, name: LimitName) -> LimitView:
    return next(one for one in w.cp.limits.views(w.runtime.now()).limits if one.name is name)


@pytest.mark.behaviour("AV5")
def test_a_limit_allows_a_burst_then_its_rate_and_everything_while_lifted():
    """The limit also reports what it holds back, and the user who lifted it."""
    limit = Limit(LimitName.STOPS, per_s=2.0, burst=3)
    assert [limit.take(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.ready(100.5) == 1
    assert limit.view(100.0).reason == "the limit is 2 per second after 3 at once"
    assert limit.view(111.0).reason == ""
    limit.lift(100.0, 60.0, "ann", "a fire")
    assert [limit.take(100.0) for _ in range(50)] == [0.0] * 50
    assert limit.ready(100.0) is None
    shown = limit.view(130.0)
    assert (shown.lifted_for_s, shown.lifted_by, shown.lifted_why) == (30.0, "ann", "a fire")
    assert (shown.passed, shown.refused) == (53, 1)
    limit.lift(130.0, 0.0, "ann", "it is out")
    assert limit.view(130.0).lifted_for_s is None


def test_a_limit_of_an_unknown_user_is_not_found():
    limits = LimitRegistry()
    first = limits.of(LimitName.STOPS, 1.0, 1)
    assert limits.of(LimitName.STOPS, 9.0, 9) is first
    assert limits.find("stops") is first
    with pytest.raises(NotFound, match="no limit 'everything'"):
        limits.find("everything")


@pytest.mark.behaviour("AV5", "F-54")
@limited(destructive_burst=1, destructive_per_s=0.02)
async def test_stops_beyond_the_limit_wait_until_an_operator_lifts_it(w: World):
    """After a mistaken stop of a whole job, only as many tasks stop as the limit allows."""
    await w.deployed(a_job(6, limits=LARGE), quota=6)
    await w.cp.stop_job("web")
    await asyncio.sleep(120)
    assert 2 <= w.alive().total() <= 5
    held = view(w, LimitName.STOPS)
    assert held.held > 0
    assert held.reason == "the limit is 0.02 per second after 1 at once"
    w.cp.limits.find("stops").lift(w.runtime.now(), 600.0, "ann", "it is meant")
    await w.until(lambda: not w.alive().total(), within_s=120)


@pytest.mark.behaviour("AV5")
@limited(9, mark_down_burst=1, mark_down_per_s=0.01, brake_share=1.0)
async def test_machines_are_declared_down_no_faster_than_the_limit(w: World):
    """The health check service enforces this limit. A confirmation by an operator does not wait."""
    await w.set_up(9)
    for name in ("m1", "m5", "m9"):
        w.region.machines[name].power_off()

    def down() -> list[str]:
        table = w.cp._broker.table
        return [m for m in w.region.machines if table.get(m).state is MachineState.DOWN]

    await asyncio.sleep(60)
    assert len(down()) == 1
    held = w.cp.health.held_back()
    assert len(held) == 2
    assert all("the rate limit holds" in one.reason for one in held)
    sure = held[0].machine
    await w.cp.health.confirm([sure], None, "no light on it", "ann")
    await w.until(lambda: sure in down(), within_s=30)
    await w.until(lambda: len(down()) == 3, within_s=600)


@pytest.mark.behaviour("AV5")
@limited(take_away_burst=1, take_away_per_s=0.01, give_back_after_s=1)
async def test_machines_are_taken_from_an_entitlement_no_faster_than_the_limit(w: World):
    """The broker enforces this limit."""
    await w.deployed(a_job(6, limits=LARGE), quota=6)
    await w.cp.stop_job("web")
    await w.until(lambda: w.cp._jobs.find("web") is None)
    await asyncio.sleep(60)
    assert w.cp._broker.count("front") in (4, 5)
    assert view(w, LimitName.TAKE_AWAY).reason
    w.cp.limits.find("take-away").lift(w.runtime.now(), 600.0, "ann", "the job is gone")
    await w.until(lambda: not w.cp._broker.count("front"), within_s=60)


@pytest.mark.behaviour("AV5")
@limited(profile_switches_burst=1, profile_switches_per_s=0.05)
async def test_profiles_are_switched_no_faster_than_the_limit(w: World):
    """A wrong assignment of the whole region reboots at most as many machines as allowed."""
    await w.set_up(6)
    await w.cp.apply_job(a_job(6, limits=LARGE))
    await asyncio.sleep(30)
    started = [m for m in w.region.machines.values() if m.wanted.name == "web"]
    assert 1 <= len(started) <= 3
    assert view(w, LimitName.PROFILES).reason
    await w.stable(within_s=600)


async def capped(w: World, machines: list[str], deadline_s: float | None = None) -> None:
    now = clock()
    deadline = None if deadline_s is None else now + deadline_s
    outages = w.cp.inventory.outages
    await outages.plan_unavailability(machines, EventKind.POWER_CAP, "feed B", now, deadline)


@pytest.mark.behaviour("SC16", "AV5")
@limited(capped_moves_burst=1, capped_moves_per_s=0.02, repair_after_s=9999)
async def test_tasks_leave_power_capped_machines_within_the_limit(w: World):
    """Target machines need power too. The deadline takes precedence."""
    most = UpdatePolicy(max_unavailable=6, drain_s=1)
    await w.deployed(a_job(6, limits=SMALL, update=most), quota=6)
    where = {t.index: t.placement.machine for t in w.cp._jobs.get("web").tasks}
    await capped(w, sorted(set(where.values()))[:3], deadline_s=400.0)

    def left() -> int:
        tasks = w.cp._jobs.get("web").tasks
        return sum(t.placement is None or t.placement.machine != where[t.index] for t in tasks)

    await asyncio.sleep(40)
    assert left() == 1
    assert view(w, LimitName.CAPPED_MOVES).reason == "tasks leave machines whose power is capped"
    await asyncio.sleep(60)
    assert left() == 2
    await w.until(lambda: left() == 3, within_s=400)


@pytest.mark.behaviour("AV6", "AV5")
def test_an_upgrade_halts_while_power_is_capped_and_no_further_capacity_is_lost():
    """Four events happen at once, as in the paper's account of an outage (§5.2).

    Traffic moves to this data center, and a load test runs in it. New racks draw power in addition
    to the old ones, and the web tier is upgraded. Then the power of an MSB is capped.
    """

    def replay(share: float) -> tuple[int, int, int]:
        """Return the least capacity while capped, and the upgraded tasks then and at the end."""

        async def main() -> tuple[int, int, int]:
            settings = {"capacity_loss_share": share, "capacity_loss_tasks": 3, "resync_s": 5}
            w = a_world(12, capped_moves_per_s=1e-6, capped_moves_burst=1, **settings)
            async with w.running():
                for machine in w.region.machines.values():
                    await w.cp.joined(machine.join())
                for name, machines in (("front", 9), ("load", 3)):
                    spec = EntitlementSpec(machines=machines, host_profile="web")
                    await w.cp.capacity.put_entitlement(name, spec)
                update = UpdatePolicy(max_unavailable=4, drain_s=1)
                web = a_job(6, limits=LARGE, update=update)
                await w.cp.apply_job(web)
                await w.stable()
                web = a_job(9, limits=LARGE, update=update)
                await w.cp.apply_job(web)  # 1: traffic arrives
                test = a_job(3, name="test", entitlement="load", limits=LARGE, update=update)
                await w.cp.apply_job(test)  # 2: a load test
                for number in range(13, 16):  # 3: new racks while the old ones are still there
                    await w.cp.joined(w.region.add(f"m{number}", "dc1", "msb3").join())
                await w.stable()
                await w.stable("test")
                jobs = w.cp._jobs
                on = sorted({t.placement.machine for t in jobs.get("web").tasks})
                hot = set(on[:5])
                await capped(w, sorted(hot))
                newer = a_job(9, limits=LARGE, update=update, command=["/bin/v2"])
                await w.cp.apply_job(newer)  # 4: the web tier is upgraded
                least = 99
                for _ in range(600):
                    tasks = jobs.get("web").tasks
                    good = sum(
                        t.listed and t.phase == "running" and t.placement.machine not in hot
                        for t in tasks
                        if t.placement is not None
                    )
                    least = min(least, good)
                    await asyncio.sleep(0.2)
                version = jobs.get("web").version
                halted = sum(t.version == version for t in tasks)
                if share < 1:
                    assert "do not serve or have" in view(w, LimitName.CAPACITY).reason
                await w.cp.inventory.outages.undrain(sorted(hot))
                await w.stable(within_s=600)
                end = sum(t.version == version for t in jobs.get("web").tasks)
            assert w.region.broken_rules == []
            return least, halted, end

        return run(main())

    least, upgraded, end = replay(share=0.3)
    worse, continued, _ = replay(share=1.0)
    assert end == 9
    assert upgraded < continued
    assert least > worse


@pytest.mark.behaviour("AV5")
@limited(capacity_loss_share=0.3, capacity_loss_tasks=2, resync_s=5)
async def test_an_operator_may_continue_an_upgrade_although_much_capacity_is_lost(w: World):
    """Broken tasks are replaced without a confirmation."""
    await w.deployed(a_job(3, limits=LARGE), quota=3)
    await w.cp.capacity.put_entitlement("load", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.apply_job(a_job(3, name="test", entitlement="load", limits=LARGE))
    await w.stable("test")
    await capped(w, sorted({t.placement.machine for t in w.cp._jobs.get("test").tasks}))
    await w.cp.apply_job(a_job(3, limits=LARGE, command=["/bin/v2"]))
    await asyncio.sleep(120)

    def newer() -> int:
        record = w.cp._jobs.get("web")
        return sum(t.version == record.version for t in record.tasks)

    assert newer() == 0
    (detail,) = {(await w.cp.get_job("web")).detail}
    assert detail.startswith("3 of 6 tasks in dc1 do not serve or have too little power")
    w.cp.limits.find("capacity").lift(w.runtime.now(), 900.0, "ann", "the fix for the load")
    await w.until(lambda: newer() == 3, within_s=300)


@pytest.mark.behaviour("TC7", "SC18")
@limited()
async def test_a_plan_that_cannot_wait_is_carried_out_at_its_deadline(w: World):
    """A deadline takes precedence over a limit on capacity."""
    await w.deployed(a_job(3, limits=LARGE), quota=6)
    losses = w.cp.shards.all[0].scheduler._losses
    losses.held_back = lambda record: dict.fromkeys(w.region.machines, "much is lost")
    host = next(m for m, tasks in w.region.where().items() if tasks)
    request = MaintenanceRequest(
        machines=[host], work=Work.REPAIR, reason="fan", deadline_s=300.0, despite=True
    )
    await w.cp.maintenance.accept("fan", request, "ann")
    await asyncio.sleep(250)
    assert w.region.where()[host]
    await w.until(lambda: not w.region.where()[host], within_s=120)
