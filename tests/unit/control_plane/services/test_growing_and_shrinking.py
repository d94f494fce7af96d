"""Entitlements grow from the free pool and return machines that they do not need."""

import asyncio
import logging
from collections import Counter

import pytest
from fake_agents import Region
from inventory import assign
from msgspec.structs import replace
from virtual_time import clock, run
from world import World, a_job, a_region

from agent.api import Limits, Location, TaskState
from control_plane.api.allocations import AllocationRecord
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.inventory import Drain, Lend, MachineScope, Revoke, Undrain
from control_plane.api.jobs import JobPhase, UpdatePolicy
from control_plane.api.machine_commands import MarkUp, QuarantineMachine
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.api.policy import Admission, Property, Requirement
from control_plane.api.settings import Overgrant
from control_plane.broker.core.unavailability import leaving
from control_plane.store.memory import MemoryStore
from control_plane.store.records import decode
from wire.errors import Busy, Conflict, InvalidInput

MIB = 1 << 20
LARGE = Limits(memory_max_bytes=600 * MIB)
"""One such task on a machine leaves 296 MiB free."""
SMALL = Limits(memory_max_bytes=250 * MIB)
QUICK = UpdatePolicy(drain_s=1)


@pytest.fixture(autouse=True)
def _no_bugs(caplog):
    yield
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert errors == []


def job(name: str, tasks: int, entitlement: str = "front", limits: Limits = LARGE, **fields):
    return a_job(
        tasks,
        **({"name": name, "entitlement": entitlement, "limits": limits, "update": QUICK} | fields),
    )


def region_of(*places: str) -> Region:
    """Return machines m1, m2, … at places like `dc1/msb1`."""
    region = Region()
    for number, place in enumerate(places, 1):
        region.add(f"m{number}", *place.split("/"))
    return region


class Watch:
    """Checks invariants after every change of any machine, and records violations.

    Of a quota of N (docs/adr/0134), at most N machines take tasks or are lent to others. Including
    draining machines, an entitlement holds at most 2 N. Beyond N, it holds only as many machines as
    are draining. A machine is in one entitlement.
    """

    def __init__(self, world: World) -> None:
        self.world, self.broken = world, list[str]()
        self.most = Counter[str]()
        """Largest number of machines that an entitlement ever held, draining and lent ones
        included.
        """
        world.cp._broker.listen(self.on_change)

    def on_change(self, name: str, _: MachineRecord | None, after: MachineRecord | None) -> None:
        if after is None or not after.entitlement:
            return
        self.check(after.entitlement, name)
        if after.loan is not None and after.loan.donor:
            self.check(after.loan.donor, name)

    def check(self, pool: str, name: str) -> None:
        records = self.world.cp._broker.table.records()
        lent = sum(r.loan is not None and pool == r.loan.donor != r.entitlement for r in records)
        own = [
            r for r in records if r.entitlement == pool and (r.loan is None or r.loan.donor == pool)
        ]
        draining = sum(leaving(record, clock()) for record in own)
        total = len(own) + lent
        self.most[pool] = max(self.most[pool], total)
        quota = self.world.cp._allocator.quotas.of(pool).machines
        if quota is not None and (total - draining > quota or total > 2 * quota):
            self.broken.append(f"{pool} holds {total} of {quota}, {draining} draining, at {name}")


def on(region: Region, **settings):
    """Run the body with a control plane on a region, and assert that no rule was ever broken."""

    def decorate(body):
        def test() -> None:
            async def main() -> None:
                world = World(region_again(region), **({"give_back_after_s": 20} | settings))
                async with asyncio.timeout(20_000):
                    async with world.running():
                        watch = Watch(world)
                        for machine in world.region.machines.values():
                            await world.cp.joined(machine.join())
                        await body(world)
                        assert watch.broken == []
                assert world.region.broken_rules == []

            run(main())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def region_again(region: Region) -> Region:
    return region_of(
        *(f"{m.location.datacenter}/{m.location.msb}" for m in region.machines.values())
    )


async def entitle(w: World, name: str, machines: int | None, **fields) -> None:
    spec = EntitlementSpec(**({"machines": machines, "host_profile": name} | fields))
    await w.cp.capacity.put_entitlement(name, spec)


def held(w: World, entitlement: str) -> list[str]:
    return [record.machine for record in w.cp._broker.held(entitlement)]


def hosts(w: World, name: str) -> dict[str, str]:
    """Return task → machine of a job, as the agents report it."""
    return {
        task: machine
        for machine, tasks in w.region.where().items()
        for task in tasks
        if task.rpartition("-")[0] == name
    }


async def deploy(w: World, *specs) -> None:
    for spec in specs:
        await w.cp.apply_job(spec)
    for spec in specs:
        await w.stable(spec.name)


# -- the paper's figures


@pytest.mark.behaviour("CP4", "CP9", "AL10", "CP3")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_figure_7(w: World):
    await entitle(w, "front", 2)
    assert held(w, "front") == []  # no jobs, no machines
    await deploy(w, job("d", 1))
    (m7,) = held(w, "front")
    await deploy(w, job("e", 2, limits=SMALL))
    assert len(held(w, "front")) == 2
    assert m7 in hosts(w, "e").values()  # one is stacked
    (m8,) = set(held(w, "front")) - {m7}
    await w.cp.stop_job("e")
    await w.until(lambda: hosts(w, "e") == {})
    stopped = clock()
    await w.until(lambda: held(w, "front") == [m7])
    assert 15 <= clock() - stopped <= 40
    assert w.cp._broker.table.get(m8).entitlement == ""
    assert w.alive()[m7] == 1


@pytest.mark.behaviour("CP5", "MO12")
@on(region_of("dc1/msb1", "dc1/msb2", "dc1/msb3", "dc2/msb4", "dc2/msb4", "dc2/msb5"))
async def test_figure_6(w: World):
    await entitle(w, "front", 3)
    await entitle(w, "back", 3)
    await deploy(w, job("a", 3))
    first = held(w, "front")
    assert len({w.region.machines[m].location.msb for m in first}) == 3
    await deploy(w, job("b", 1, limits=SMALL), job("c", 1, "back"))
    assert held(w, "front") == first
    assert set(hosts(w, "b").values()) < set(first)  # a and b stack
    (of_c,) = held(w, "back")
    await deploy(w, job("c", 2, "back"))
    assert len(held(w, "back")) == 2
    assert of_c in held(w, "back")
    assert not set(held(w, "back")) & set(first)
    assert held(w, "front") == first


# -- quotas


@pytest.mark.behaviour("CP1", "CP3")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc2/msb3"))
async def test_a_smaller_quota_counts_as_machines_empty(w: World):
    await entitle(w, "front", 4)
    await deploy(w, job("a", 2), job("b", 2))
    assert len(held(w, "front")) == 4
    await entitle(w, "front", 2)
    await asyncio.sleep(60)
    assert len(held(w, "front")) == 4  # no task is stopped for it
    await w.cp.stop_job("b")
    await w.until(lambda: len(held(w, "front")) == 2, within_s=15)
    await asyncio.sleep(60)
    assert sorted(hosts(w, "a").values()) == held(w, "front")


@pytest.mark.behaviour("CP7")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_a_job_that_grows_wildly_cannot_take_what_others_were_promised(w: World):
    await entitle(w, "front", 2)
    await entitle(w, "back", 1)
    await deploy(w, job("a", 2))
    await w.cp.apply_job(job("rogue", 2))
    await asyncio.sleep(60)
    assert len(held(w, "front")) == 2
    status = await w.cp.get_job("rogue")
    assert status.phase is JobPhase.WAITING
    assert "the quota of machines is used up" in status.detail
    await deploy(w, job("c", 1, "back"))


async def of_type(w: World, machine_type: str, *names: str) -> None:
    for name in names:
        change = lambda record: replace(record, machine_type=machine_type)  # noqa: E731
        await w.cp._broker.of(name).change_many([name], change)


@pytest.mark.behaviour("CP7")
@on(region_of("dc1/msb1", "dc1/msb1", "dc1/msb2", "dc1/msb3"))
async def test_a_request_for_any_type_leaves_scarce_types_to_others(w: World):
    await of_type(w, "plain", "m1", "m2")
    await of_type(w, "rare", "m3", "m4")
    await entitle(w, "front", 3)
    await entitle(w, "back", None, per_type={"rare": 1})
    await deploy(w, job("a", 3))  # spread wants m1, m3 and m4, all at once
    kinds = sorted(w.cp._broker.table.get(m).machine_type for m in held(w, "front"))
    assert kinds == ["plain", "plain", "rare"]
    await entitle(w, "front", 2)
    await entitle(w, "third", 1)
    await w.cp.apply_job(job("c", 1, "third"))
    await asyncio.sleep(30)
    explained = await w.cp.job_planner.explain("c")
    assert explained.reasons == ["1 free machine: reserved for others"]
    await deploy(w, job("b", 1, "back"))
    await w.cp.apply_job(job("a", 2))
    await w.stable("c")


@pytest.mark.behaviour("CP6")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_higher_priority_goes_first_when_there_are_too_few_machines(w: World):
    portal = w.cp._portal
    portal.settings = replace(portal.settings, overgrant=Overgrant.ALLOW)
    await entitle(w, "old", 2)
    await entitle(w, "low", 2, priority=100)
    await entitle(w, "high", 2, priority=900)
    await deploy(w, job("gone", 1, "old"), job("goes", 1, "old"))
    await w.cp.apply_job(job("cheap", 1, "low"))
    await w.cp.apply_job(job("dear", 1, "high"))
    await asyncio.sleep(60)
    assert hosts(w, "cheap") == hosts(w, "dear") == {}
    await w.cp.stop_job("gone")
    await w.until(lambda: len(hosts(w, "dear")) == 1)
    await asyncio.sleep(60)
    assert hosts(w, "cheap") == {}
    await w.cp.stop_job("goes")
    await w.until(lambda: len(hosts(w, "cheap")) == 1)


@pytest.mark.behaviour("CP6")
@on(region_of("dc1/msb1"))
async def test_a_lower_priority_gets_what_a_higher_one_cannot_use(w: World):
    portal = w.cp._portal
    portal.settings = replace(portal.settings, overgrant=Overgrant.ALLOW)
    await entitle(w, "old", 1)
    await entitle(w, "low", 1, priority=100)
    await entitle(w, "high", 2, priority=900)
    await deploy(w, job("gone", 1, "old"))
    await w.cp.apply_job(job("cheap", 1, "low"))
    await w.cp.apply_job(job("dear", 2, "high", admission=Admission.GANG))
    await asyncio.sleep(60)
    await w.cp.stop_job("gone")
    await w.until(lambda: len(hosts(w, "cheap")) == 1, within_s=60)


@pytest.mark.behaviour("CP10")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc2/msb4"))
async def test_an_entitlement_pinned_to_a_data_center_stays_there(w: World):
    await entitle(w, "front", 2, datacenter="dc2")
    await deploy(w, job("a", 2))
    assert held(w, "front") == ["m3", "m4"]
    assert sorted(hosts(w, "a").values()) == ["m3", "m4"]
    w.region.machines["m3"].power_off()
    await asyncio.sleep(120)
    assert (await w.cp.get_job("a")).phase is JobPhase.WAITING
    assert "m1" not in held(w, "front")
    assert "m2" not in held(w, "front")


@pytest.mark.behaviour("MO16", "MO12")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_reservations_stack_on_the_machines_that_they_share(w: World):
    await entitle(w, "base", 1)
    await entitle(w, "one", 1, materialization="base", host_profile="base")
    await entitle(w, "two", 1, materialization="base", host_profile="base")
    await deploy(w, job("a", 3, "one", SMALL), job("b", 3, "two", SMALL))
    assert len(held(w, "base")) == 3
    assert held(w, "one") == held(w, "two") == []
    shared = set(hosts(w, "a").values()) & set(hosts(w, "b").values())
    assert shared
    assert {m.profile.name for m in w.region.machines.values()} == {"base"}


@pytest.mark.behaviour("AL5")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_any_place_of_the_region_may_be_required(w: World):
    await entitle(w, "front", 2)
    wanted = {
        "a": (Property.MSB, "msb1", ["m1"]),
        "b": (Property.MSB, "dc1/msb2", ["m2"]),
        "c": (Property.MACHINE, "m2", ["m2"]),
        "d": (Property.MACHINE, "m9", []),  # it may be taken, because the task waits
    }
    for name, (property_, value, _) in wanted.items():
        there = Requirement(property=property_, values=[value])
        await w.cp.apply_job(job(name, 1, limits=SMALL, requires=[there]))
    await asyncio.sleep(60)
    assert {name: list(hosts(w, name).values()) for name in wanted} == {
        name: where for name, (_, _, where) in wanted.items()
    }


@pytest.mark.behaviour("AL5", "FE4")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_a_place_that_the_region_does_not_have_is_refused(w: World):
    await entitle(w, "front", 2)
    with pytest.raises(
        InvalidInput, match="no machine can take such a task: 2 machines: requirement not met"
    ):
        await w.cp.apply_job(
            job("a", 1, requires=[Requirement(property=Property.MSB, values=["msb9"])])
        )


@pytest.mark.behaviour("WH1")
@on(region_of("dc1/msb1", "dc1/msb2"))
async def test_room_of_one_data_center_serves_a_job_started_anywhere(w: World):
    w.region.add("m3", "dc2", "msb3")
    await w.cp.joined(w.region.machines["m3"].join())
    await entitle(w, "front", 2)
    await entitle(w, "back", 1)
    at_home = Requirement(property=Property.DATACENTER, values=["dc1"])
    await deploy(w, job("a", 2, requires=[at_home]))
    await deploy(w, job("b", 1, "back"))
    assert held(w, "back") == ["m3"]


# -- machines that break, leave and come


@pytest.mark.behaviour("AL3", "CP3")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc2/msb3"))
async def test_a_broken_machine_is_exchanged_when_the_quota_is_used_up(w: World):
    await entitle(w, "front", 3)
    await deploy(w, job("a", 3))
    broken = held(w, "front")[0]
    w.region.machines[broken].power_off()
    await w.until(lambda: len(hosts(w, "a")) == 3)
    await w.stable("a")
    assert broken not in held(w, "front")
    assert len(held(w, "front")) == 3


@pytest.mark.behaviour("AL3")
@on(region_of(*(f"dc{n % 2}/msb{n}" for n in range(12))), brake_share=1.0)
async def test_a_machine_that_comes_back_while_others_are_exchanged_stays(w: World):
    """The decision used a list from before the machine's return, and is repeated."""
    await entitle(w, "front", 6)
    await deploy(w, job("a", 6))
    first, second = broken = held(w, "front")[:2]
    release, states = w.cp._broker.release, list[MachineState]()

    async def slowly(name: str, *, revision: int) -> object:
        states.append(w.cp._broker.table.get(name).state)
        if len(states) == 1:
            await w.cp._broker.carry_out(second if name == first else first, MarkUp())
        return await release(name, revision=revision)

    w.cp._broker.release = slowly
    for name in broken:
        w.region.machines[name].power_off()
    await w.until(lambda: len(hosts(w, "a")) == 6)
    assert len(states) >= 2
    assert MachineState.UP not in states


async def least_serving(w: World, name: str, seen: list[int]) -> None:
    while True:
        endpoints = (await w.cp.endpoints(name)).endpoints
        for e in endpoints:
            status = w.region.machines[e.machine].tasks.get(e.task)
            if status is None or status.state is not TaskState.RUNNING:
                w.region.broke(f"{e.task} is listed but does not run on {e.machine}")
        seen.append(len(endpoints))
        await asyncio.sleep(0.05)


@pytest.mark.behaviour("RB3", "SC6")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3", "dc2/msb3"))
async def test_tasks_leave_a_machine_for_maintenance_within_their_budget(w: World):
    await entitle(w, "front", 3)
    await deploy(w, job("a", 3), job("b", 3, limits=SMALL))
    seen: list[int] = []
    watcher = asyncio.create_task(least_serving(w, "b", seen))
    leaves = held(w, "front")[0]
    await w.cp.inventory.drain(Drain(machines=[leaves], reason="new fans"))
    await w.until(lambda: leaves not in held(w, "front"), within_s=300)
    await w.stable("a")
    await w.stable("b")
    watcher.cancel()
    assert min(seen) >= 2  # max_unavailable is 1
    assert w.alive()[leaves] == 0
    assert len(held(w, "front")) == 3


@pytest.mark.behaviour("RB11", "HC14", "RB10")
@on(region_of(*["dc1/msb1", "dc1/msb2", "dc1/msb3"], *["dc2/msb4", "dc2/msb5", "dc2/msb6"]))
async def test_a_data_center_is_emptied_and_its_owners_do_nothing(w: World):
    await entitle(w, "front", 3)
    await entitle(w, "back", 2)
    await deploy(w, job("a", 3), job("b", 3, limits=SMALL), job("c", 2, "back"))
    for number in (7, 8):  # its replacement
        w.region.add(f"m{number}", "dc3", "msb7")
        await w.cp.joined(w.region.machines[f"m{number}"].join())
    assert len(w.cp._broker.held("")) >= 2
    scope = MachineScope(datacenter="dc1")
    await w.cp.inventory.drain(Drain(scope=scope, kind=EventKind.DECOMMISSION, reason="it is old"))
    old = ("m1", "m2", "m3")

    def is_empty() -> bool:
        return all(w.alive()[m] == 0 and not w.cp._broker.table.get(m).entitlement for m in old)

    await w.until(is_empty, within_s=600)
    for name in ("a", "b", "c"):
        await w.stable(name)
        assert {w.region.machines[m].location.datacenter for m in hosts(w, name).values()} <= {
            "dc2",
            "dc3",
        }
    for machine in old:
        await w.cp.inventory.remove(machine)
    assert not set(old) & w.cp._allocator.index.machines.keys()


@pytest.mark.behaviour("AL8", "AL9")
@on(region_of(*(f"dc{1 + n % 2}/msb{n % 4}" for n in range(16))))
async def test_tasks_of_a_lost_msb_run_elsewhere(w: World):
    await entitle(w, "front", 16)
    await deploy(w, job("a", 12))
    per_msb = Counter(w.region.machines[m].location.msb for m in hosts(w, "a").values())
    assert set(per_msb.values()) == {3}
    lost = [m for m in w.region.machines.values() if m.location.msb == "msb1"]
    for machine in lost:
        machine.power_off()
    await w.until(lambda: len(hosts(w, "a")) == 12, within_s=300)
    await w.stable("a")
    per_msb = Counter(w.region.machines[m].location.msb for m in hosts(w, "a").values())
    assert set(per_msb.values()) == {4}
    assert "msb1" not in per_msb


@pytest.mark.behaviour("CP3", "BUG-AU2")
@on(region_of(*(f"dc1/msb{1 + n % 3}" for n in range(9))))
async def test_a_drained_entitlement_is_exchanged_and_never_holds_more_than_twice_its_quota(
    w: World,
):
    """The watch ignored draining machines. It now counts them and lent machines."""
    watch = Watch(w)
    await entitle(w, "front", 2)
    quick, slow = (UpdatePolicy(drain_s=s, max_unavailable=2) for s in (1, 300))
    await deploy(w, job("a", 2, update=quick), job("b", 2, limits=SMALL, update=slow))
    old = held(w, "front")
    await w.cp.inventory.drain(Drain(machines=old, reason="new fans"))
    await w.until(lambda: len(held(w, "front")) == 4, within_s=100)
    new = sorted(set(held(w, "front")) - set(old))
    await w.cp.inventory.drain(Drain(machines=new, reason="new disks"))
    await asyncio.sleep(60)  # the first two are not empty yet, so no more may be taken
    assert len(held(w, "front")) == 4
    await w.cp.inventory.undrain(Undrain(machines=new))
    await w.until(lambda: len(held(w, "front")) == 2, within_s=3600)
    for name in ("a", "b"):
        await w.stable(name)
    assert watch.most["front"] == 4
    assert watch.broken == []


# -- loans


@pytest.mark.behaviour("EL1", "EL2", "EL3", "EL4", "EL6", "RB8")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"), give_back_after_s=1000)
async def test_a_loan_is_used_and_comes_back_in_time(w: World):
    await entitle(w, "online", 2)
    await entitle(w, "offline", 1)
    await deploy(w, job("serve", 2, "online"), job("train", 1, "offline"))
    await w.cp.apply_job(job("serve", 1, "online"))
    (busy,) = await one_host(w, "serve")
    (idle,) = set(held(w, "online")) - {busy}
    await w.until(lambda: w.alive()[idle] == 0)
    await w.until(lambda: lend(w, idle))
    await w.cp.apply_job(job("batch", 1, "offline"))  # the quota is used up, so it needs the loan
    await w.stable("batch")
    assert hosts(w, "batch") == {"batch-0": idle}
    (loan,) = w.cp.inventory.loans.lent()
    assert (loan.loan.donor, loan.entitlement) == ("online", "offline")
    await w.cp.inventory.revoke(Revoke(machines=[idle], return_within_s=60))
    await w.cp.apply_job(job("serve", 2, "online"))
    await w.stable("serve")
    assert sorted(hosts(w, "serve").values()) == sorted([busy, idle])
    events = w.cp._broker.table.get(idle).unavailability
    (revoked,) = [event for event in events if event.kind is EventKind.REVOKED]
    assert revoked.end - revoked.start <= 62
    assert (await w.cp.get_job("batch")).phase is JobPhase.WAITING
    assert hosts(w, "batch") == {}


async def one_host(w: World, name: str) -> list[str]:
    await w.until(lambda: len(hosts(w, name)) == 1)
    return list(hosts(w, name).values())


async def lend(w: World, machine: str) -> bool:
    try:
        await w.cp.inventory.lend(Lend(machine=machine, borrower="offline", donor="online"))
    except Conflict:
        return False
    return True


# -- restarts and missed events


def test_jobs_of_an_older_store_are_taken_over():
    async def main() -> None:
        world = World(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
        async with world.running():
            for machine in world.region.machines.values():
                await world.cp.joined(machine.join())
            await entitle(world, "front", 3)
            await deploy(world, job("a", 2), job("b", 2, limits=SMALL))
        before = hosts(world, "a"), hosts(world, "b")
        for key in [k for k in world.store._entries if k.startswith("allocations/")]:
            del world.store._entries[key]
        world.store._order = None
        async with world.running():
            assert len(world.cp._allocator.index.claims["a"]) == 2
            await asyncio.sleep(60)
            assert (hosts(world, "a"), hosts(world, "b")) == before
            await deploy(world, job("a", 3))
            stored = [k for k in world.store._entries if k.startswith("allocations/")]
            assert "allocations/a" in stored
        assert all(len(m.starts) == len(set(m.starts)) for m in world.region.machines.values())
        assert world.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("AL2")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_events_that_were_missed_are_made_up_for(w: World):
    broker, index = w.cp._broker, w.cp._allocator.index
    place = Location(datacenter="dc1", msb="msb1")
    names = ("gone", "goes", "comes")  # no agents run there, so nothing else reports them
    records = {
        name: MachineRecord(machine=name, machine_type="x", location=place) for name in names
    }
    await broker.add({name: records[name] for name in ("gone", "goes")})
    await asyncio.sleep(w.settings.resync_s + 5)
    listeners, broker._listeners = broker._listeners, []
    leave = Drain(machines=["gone", "goes"], kind=EventKind.DECOMMISSION, reason="unheard")
    await w.cp.inventory.drain(leave)
    await broker.remove("gone")
    await broker.add({"comes": records["comes"]})
    broker._listeners = listeners
    assert ("gone" in index.machines, "comes" in index.machines) == (True, False)
    await asyncio.sleep(w.settings.resync_s + 5)
    assert ("gone" in index.machines, "comes" in index.machines) == (False, True)
    assert index.machines["goes"].blocked == "is being decommissioned: unheard"


@pytest.mark.behaviour("AL3")
@on(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"))
async def test_the_end_of_a_quarantine_is_noticed(w: World):
    await entitle(w, "front", 3)
    await w.until(w.all_answer)
    broker = w.cp._broker
    for name in ("m1", "m2", "m3"):
        await assign(broker.of(name), name, "front", "front")
        await broker.carry_out(name, QuarantineMachine(reason="it is broken", until=clock() + 300))
    await w.cp.apply_job(job("a", 3))
    await asyncio.sleep(120)
    assert hosts(w, "a") == {}
    await w.stable("a", within_s=400)


class Stubborn(MemoryStore):
    """Refuses to write jobs for a while after an allocation was written."""

    armed = refuses = False

    async def txn(self, compare, operations) -> int:
        keys = [operation.key for operation in operations]
        if self.refuses and any(key.startswith("jobs/") for key in keys):
            raise Busy("the store cannot be used")
        revision = await super().txn(compare, operations)
        if self.armed and any(key.startswith("allocations/") for key in keys):
            self.armed, self.refuses = False, True
        return revision


@pytest.mark.behaviour("AL12", "BUG-AL35")
def test_an_unstored_move_is_undone_when_the_machine_returns():
    """The claim was restored in memory only, and a restart read the old one."""

    async def main() -> None:
        store = Stubborn()
        world = World(region_of("dc1/msb1", "dc1/msb2", "dc2/msb3"), store)
        async with world.running():
            for machine in world.region.machines.values():
                await world.cp.joined(machine.join())
            await entitle(world, "front", 3)
            await deploy(world, job("a", 1))
            (home,) = held(world, "front")
            store.armed = True
            world.region.machines[home].reachable = False
            await world.until(lambda: store.refuses)
            world.region.machines[home].reachable = True
            await asyncio.sleep(10)
            store.refuses = False
            await asyncio.sleep(60)
            await world.stable("a")
            (claim,) = world.cp._allocator.index.claims["a"]
            assert hosts(world, "a") == {"a-0": claim.machine.name} == {"a-0": home}
            assert len(world.region.machines[home].starts) == 1
            entry = await store.get("allocations/a")
            assert entry is not None
            assert decode(entry.value, AllocationRecord, entry.key).machines == [home]
        async with world.running():
            (claim,) = world.cp._allocator.index.claims["a"]
            assert claim.machine.name == home
        assert world.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("AL3", "BUG-AL7")
def test_a_machine_is_given_back_once_what_moved_away_is_gone_there():
    """The machine was cut off and its task runs elsewhere. The old copy takes time to stop."""

    async def main() -> None:
        world = World(a_region(3), give_back_after_s=20)
        async with world.running():
            await world.deployed(a_job(1))
            (first,) = [m for m in world.region.machines.values() if m.tasks]
            first.reachable = False
            await world.until(lambda: len(world.region.copies("web-0")) == 2, 600)
            first.behaviour.stop_s = 120.0
            first.reachable = True
            table = world.cp._broker.table
            await world.until(lambda: not table.get(first.name).entitlement, 900)
            assert not first.tasks

    run(main())
