"""Loans return in time; planned outages are announced, end, and release their machines."""

import asyncio

import pytest
from inventory import a_join, a_machine, assign, loaded
from virtual_time import RUNTIME, run

from control_plane.api.inventory import MachineScope
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.unavailability import blocking, leaving, open_event
from control_plane.broker.loans import Loans
from control_plane.broker.outages import Outages
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, InvalidInput, NotFound


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def revoke_times_s(record: MachineRecord) -> list[float]:
    """Return how long each revoked loan of a machine took to end."""
    return [
        event.end - event.start
        for event in record.unavailability
        if event.kind is EventKind.REVOKED and event.end is not None
    ]


async def four(store: MemoryStore, time: Time | None = None) -> tuple[Brokers, Outages, Loans]:
    at = time or Time()
    clock = Runtime(at, boot=at)
    brokers = Brokers(store, clock)
    outages, loans = Outages(brokers, clock), Loans(brokers, clock)
    await brokers.load()
    await brokers.add(
        {f"m{i}": a_machine(f"m{i}", f"dc{i % 2}", cluster=f"c{i // 2}") for i in range(4)}
    )
    return brokers, outages, loans


async def give(brokers: Brokers, name: str, entitlement: str) -> None:
    await assign(brokers.of(name), name, entitlement, entitlement)


@pytest.mark.behaviour("EL1", "EL3", "EL4", "RB8", "EL2")
async def test_a_whole_machine_is_lent_and_comes_back_to_its_donor() -> None:
    time = Time()
    async with MemoryStore() as store:
        brokers, _, loans = await four(store, time)
        await give(brokers, "m0", "online")
        record = await loans.lend("m0", "batch", "offline", donor="online", empty=True)
        assert (record.entitlement, record.profile_wanted) == ("batch", "offline")
        assert record.assignment_generation == 2
        assert record.loan is not None
        assert (record.loan.donor, record.loan.since) == ("online", 1000.0)
        assert [r.machine for r in loans.lent()] == ["m0"]
        revision = brokers.table.revision("m0")
        with pytest.raises(Conflict, match="on loan from entitlement 'online'"):
            await brokers.release("m0", revision=revision)
        time.now = 1100.0
        (record,) = await loans.revoke(["m0"], 60.0)
        assert leaving(record, time.now)
        event = open_event(record, EventKind.REVOKED)
        assert event is not None
        assert (event.start, event.deadline) == (1100.0, 1160.0)
        with pytest.raises(Conflict, match="still runs tasks of the borrower"):
            await loans.give_back("m0", "online", empty=False)
        time.now = 1112.0
        record = await loans.give_back("m0", "online", empty=True)
        assert (record.entitlement, record.profile_wanted, record.loan) == ("online",) * 2 + (None,)
        assert record.assignment_generation == 3
        assert not leaving(record, time.now)
        assert revoke_times_s(record) == [12.0]
        assert loans.lent() == []


@pytest.mark.behaviour("EL2", "RB8")
async def test_after_its_deadline_a_loan_ends_by_force() -> None:
    time = Time()
    async with MemoryStore() as store:
        _, _, loans = await four(store, time)
        await loans.lend("m0", "batch", "offline", donor=FREE, empty=True)
        await loans.revoke(["m0"], 60.0)
        await loans.revoke(["m0"], 600.0)  # a later deadline does not help the borrower
        loan = loans.lent()[0].loan
        assert loan is not None
        assert (loan.revoked_at, loan.return_by) == (1000.0, 1060.0)
        time.now = 1060.0
        record = await loans.give_back("m0", "", empty=False)
        assert (record.entitlement, record.profile_wanted) == (FREE, "")
        again = Loans(again_brokers := Brokers(store, Runtime(time, boot=time)), Runtime(time))
        await again_brokers.load()
        assert again.lent() == []


async def test_a_machine_that_cannot_be_lent_is_refused_with_the_reason() -> None:
    async with MemoryStore() as store:
        brokers, outages, loans = await four(store)
        await give(brokers, "m0", "online")
        cases = {
            "is in the free pool, not in entitlement 'online'": ("m1", "batch", "online", True),
            "is in entitlement 'online', not in the free pool": ("m0", "batch", "", True),
            "is already in entitlement 'online'": ("m0", "online", "online", True),
            "still runs tasks": ("m0", "batch", "online", False),
        }
        for why, (machine, borrower, donor, empty) in cases.items():
            with pytest.raises(Conflict, match=f"cannot lend machine '{machine}': it {why}"):
                await loans.lend(machine, borrower, "p", donor=donor, empty=empty)
        await outages.plan_unavailability(["m2"], EventKind.MAINTENANCE, "fan", start=1500.0)
        with pytest.raises(Conflict, match="will be taken for maintenance: fan"):
            await loans.lend("m2", "batch", "p", donor="", empty=True)
        await loans.lend("m1", "batch", "p", donor="", empty=True)
        with pytest.raises(Conflict, match="is already on loan, to entitlement 'batch'"):
            await loans.lend("m1", "other", "p", donor="batch", empty=True)
        with pytest.raises(Conflict, match="m0 is not on loan; m3 is not on loan"):
            await loans.revoke(["m0", "m1", "m3"], 1.0)
        assert brokers.table.get("m1").loan == (await loaded(store)).table.get("m1").loan


@pytest.mark.behaviour("BUG-CP106")
async def test_more_loans_than_a_transaction_takes_are_revoked_by_one_request() -> None:
    """On etcd that was an internal error, and no loan was called back."""
    async with MemoryStore(strict=True) as store:
        brokers, _, loans = await four(store)
        names = [f"n{number:03d}" for number in range(150)]
        for first in range(0, 150, 50):
            some = names[first : first + 50]
            await brokers.add({name: a_machine(name, "dc0") for name in some})
        for name in names:
            await loans.lend(name, "batch", "p", donor=FREE, empty=True)
        changed = await loans.revoke(names, 60.0)
        assert [record.machine for record in changed] == names
        assert all(r.loan is not None and r.loan.return_by == 1060.0 for r in loans.lent())


@pytest.mark.behaviour("EL2")
def test_revoked_machines_go_back_by_themselves() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            brokers = Brokers(store, RUNTIME)
            loans = Loans(brokers, RUNTIME)
            await brokers.load()
            await brokers.add({n: a_machine(n) for n in ("m1", "m2", "m3")})
            await give(brokers, "m1", "online")
            for name, donor in (("m1", "online"), ("m2", ""), ("m3", "")):
                await loans.lend(name, "batch", "offline", donor=donor, empty=True)
            busy = {"m1", "m2"}
            keeper = asyncio.create_task(
                loans.run(lambda name: name not in busy, lambda donor: f"{donor}-profile")
            )
            await asyncio.sleep(5)
            assert len(loans.lent()) == 3  # they were not revoked
            await loans.revoke(["m1", "m2"], 100.0)
            await asyncio.sleep(10)
            busy.discard("m1")
            await asyncio.sleep(2)
            record = brokers.table.get("m1")
            assert (record.entitlement, record.profile_wanted) == ("online", "online-profile")
            assert 10 <= revoke_times_s(record)[0] <= 12
            assert brokers.table.get("m2").entitlement == "batch"
            await asyncio.sleep(100)
            assert brokers.table.get("m2").entitlement == FREE  # by force
            assert [r.machine for r in loans.lent()] == ["m3"]
            keeper.cancel()
            await asyncio.wait([keeper])

    run(main())


@pytest.mark.behaviour("RB3", "MO18")
async def test_planned_events_carry_start_deadline_and_duration() -> None:
    async with MemoryStore() as store:
        brokers, outages, _ = await four(store)
        await outages.plan_unavailability(
            ["m0", "m1"], EventKind.MAINTENANCE, "new fan", 9000.0, 9600.0, 1800.0
        )
        for record in (await loaded(store)).table.records()[:2]:
            (event,) = record.unavailability
            assert (event.reason, event.start, event.deadline) == ("new fan", 9000.0, 9600.0)
            assert event.expected_duration_s == 1800.0
            assert blocking(record, 1000.0) == ""
            assert blocking(record, 6000.0) == "will be taken for maintenance: new fan"
            assert not leaving(record, 8999.0)
            assert leaving(record, 9000.0)
        await outages.plan_unavailability(["m0"], EventKind.MAINTENANCE, "and a board")
        (event,) = brokers.table.get("m0").unavailability
        assert (event.reason, event.start) == ("and a board", 1000.0)
        await outages.undrain(["m0"])
        assert not leaving(brokers.table.get("m0"), 2000.0)
        assert brokers.table.get("m0").unavailability[0].end == 1000.0
        await outages.undrain(["m1"])
        assert brokers.table.get("m1").unavailability[0].end == 1000.0
        with pytest.raises(InvalidInput, match="the deadline is before the start"):
            await outages.plan_unavailability(["m0"], EventKind.REFRESH, "x", 10.0, 5.0)
        with pytest.raises(InvalidInput, match="failure cannot be planned"):
            await outages.plan_unavailability(["m0"], EventKind.FAILURE, "x")


@pytest.mark.behaviour("RB11", "HC14", "MO21", "RB10")
async def test_a_cluster_is_decommissioned_as_one_event_and_then_gone() -> None:
    async with MemoryStore() as store:
        brokers, outages, _ = await four(store)
        names = await outages.machines([], MachineScope(cluster="c1"))
        assert names == ["m2", "m3"]
        await give(brokers, "m2", "front")
        with pytest.raises(Conflict, match="is not being decommissioned"):
            await brokers.remove("m3")
        await outages.plan_unavailability(names, EventKind.DECOMMISSION, "site closes")
        assert all(leaving(brokers.table.get(name), 1000.0) for name in names)
        with pytest.raises(Conflict, match="is in entitlement 'front'"):
            await brokers.remove("m2")
        await brokers.release("m2", revision=brokers.table.revision("m2"))
        for name in names:
            await brokers.remove(name)
        assert list(brokers.table) == ["m0", "m1"]
        assert list((await loaded(store)).table) == ["m0", "m1"]
        await brokers.join(a_join("m9", "dc1"))  # its successor joins the pool
        assert "m9" in [record.machine for record in brokers.held(FREE)]
        with pytest.raises(NotFound, match="'m2'"):
            await outages.machines(["m0", "m2"], None)
        with pytest.raises(NotFound, match="no machine is in this scope"):
            await outages.machines([], MachineScope(cluster="c1"))
        with pytest.raises(InvalidInput, match="an empty scope is the whole region"):
            await outages.machines([], MachineScope())


async def test_open_events_are_never_forgotten_and_old_ones_are() -> None:
    async with MemoryStore() as store:
        brokers, outages, _ = await four(store)
        await outages.plan_unavailability(["m0"], EventKind.REFRESH, "next year", 9e6)
        for _ in range(30):
            await brokers.carry_out("m0", MarkDown(reason="test"))
            await brokers.carry_out("m0", MarkUp())
        record: MachineRecord = brokers.table.get("m0")
        assert len(record.unavailability) <= 21
        assert open_event(record, EventKind.REFRESH) is not None
