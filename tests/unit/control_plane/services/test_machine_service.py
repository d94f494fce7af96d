"""Machine queries of operators, as the front end passes them on."""

import asyncio

import pytest
from inventory import a_join, a_machine, a_region_of, assign

from control_plane.api.inventory import Drain, Lend, MachineScope, Revoke, Undrain
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import EventKind, MachineState, MachineView
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.inventory import COLUMNS
from control_plane.broker.service import MachineQuery, MachineService
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import PART
from control_plane.store import Store
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, InvalidInput, NotFound

PROFILES = {"batch": "offline", "online": "web"}


class World:
    def __init__(self, store: Store) -> None:
        self.now = 1000.0
        self.tasks: dict[str, list[str]] = {}
        self.brokers = Brokers(store, Runtime(lambda: self.now, boot=lambda: self.now))
        self.service = MachineService(
            self.brokers,
            Runtime(lambda: self.now, boot=lambda: self.now),
            lambda record: MachineView(record=record, tasks=self.tasks.get(record.machine, [])),
            lambda name: PROFILES.get(name, ""),
            tasks_of=lambda machine: (len(self.tasks.get(machine, [])), True),
        )


async def a_world(store: Store) -> World:
    world = World(store)
    await world.brokers.load()
    return world


def a_list(*names: str, datacenter: str = "dc1", rack: str = "r1") -> bytes:
    columns = ("machine", "datacenter", "msb", "row", "rack", "machine_type", "memory")
    assert set(columns) <= set(COLUMNS)
    rows = [f"{name},{datacenter},b1,w1,{rack},web,64G" for name in names]
    return "\n".join([",".join(columns), *rows]).encode()


@pytest.mark.behaviour("MO2")
async def test_machines_are_listed_page_by_page() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.brokers.add(a_region_of(datacenters=2, msbs=2, rows=1, racks=5, machines=10))
        seen, after = [], ""
        while True:
            page = await world.service.page(MachineQuery(MachineScope(msb="dc1-msb0")), after, 7)
            seen += [view.record.machine for view in page.machines]
            if not page.next:
                break
            after = page.next
        assert seen == [r.machine for r in await world.brokers.scan(MachineScope(msb="dc1-msb0"))]
        assert len(seen) == 50


@pytest.mark.behaviour("FE1")
async def test_machines_are_searched_and_sorted_by_pages_of_numbers() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.brokers.add(a_region_of(datacenters=2, msbs=2, rows=1, racks=5, machines=10))
        names = [record.machine for record in await world.brokers.scan(MachineScope())]
        world.tasks = {names[7]: ["a-0", "a-1"], names[30]: ["a-2"]}
        query, found, after = MachineQuery(MachineScope(), sort="tasks"), [], ""
        while not found or after:
            page = await world.service.page(query, after, 60)
            found += [view.record.machine for view in page.machines]
            after = page.next
        assert found == [names[7], names[30], *(n for n in names if n not in world.tasks)]
        page = await world.service.page(MachineQuery(MachineScope(), names[3][3:]), "", 500)
        assert names[3] in [view.record.machine for view in page.machines] != names
        with pytest.raises(InvalidInput, match="after is a number"):
            await world.service.page(query, "x", 5)
        with pytest.raises(InvalidInput, match="sort is one of name"):
            await world.service.page(MachineQuery(MachineScope(), sort="luck"), "", 5)


@pytest.mark.behaviour("FE1")
async def test_the_map_counts_every_machine_of_the_region_once() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.brokers.add(a_region_of(datacenters=2, msbs=2, rows=1, racks=5, machines=10))
        found = await world.service.region_map("state")
        assert (found.machines, len(found.racks), found.meanings) == (200, 20, ["free"])
        assert all(len(rack.cells) == rack.counts["free"] == 10 for rack in found.racks)
        with pytest.raises(InvalidInput, match="by is one of state"):
            await world.service.region_map("luck")


@pytest.mark.behaviour("RB4", "AL2")
async def test_a_subscriber_lists_a_broker_and_then_receives_its_changes() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.brokers.add({f"m{i}": a_machine(f"m{i}") for i in range(5)})
        first = await world.service.broker_page("dc1", "", 3)
        await world.brokers.carry_out("m4", MarkDown(reason="test"))
        second = await world.service.broker_page("dc1", first.next, 3)
        assert [m.machine for m in first.machines + second.machines] == [f"m{i}" for i in range(5)]
        assert second.next == ""
        news = await world.service.broker_changes("dc1", first.revision, 100, 0.0)
        assert [c.name for c in news.changes] == ["m4"]
        waiting = asyncio.create_task(world.service.broker_changes("dc1", news.revision, 100, 30.0))
        await asyncio.sleep(0)
        await world.brokers.carry_out("m4", MarkUp())
        record = (await waiting).changes[0].record
        assert record is not None
        assert record.state is MachineState.UP
        quiet = await world.service.broker_changes(
            "dc1", world.brokers.at("dc1").table.latest, 1, 0.0
        )
        assert (quiet.changes, quiet.lost) == ([], False)
        assert (await world.service.broker_changes("dc1", 5, 100, 30.0)).lost  # of another life
        with pytest.raises(NotFound):
            await world.service.broker_page("dc9", "", 3)
        (view,) = world.service.brokers().brokers
        assert (view.datacenter, view.machines, view.free) == ("dc1", 5, 5)


@pytest.mark.behaviour("RB10")
async def test_an_import_adds_updates_and_leaves_alone() -> None:
    async with MemoryStore(strict=True) as store:
        world = await a_world(store)
        names = [f"m{i:04}" for i in range(2500)]
        plan = await world.service.import_inventory(a_list(*names), "csv", dry_run=True)
        assert (plan.added, plan.updated, plan.unchanged) == (2500, 0, 0)
        assert len(world.brokers.table) == 0
        before = (await store.list_prefix("")).revision
        await world.service.import_inventory(a_list(*names), "csv")
        rows, staged = -(-2500 // PART), -(-2500 // PART // 8)
        cleared = 1 + 1  # the rows, in one part here, and the decision
        assert (await store.list_prefix("")).revision == before + staged + 1 + rows + cleared
        again = await world.service.import_inventory(a_list(*names), "csv")
        assert (again.added, again.updated, again.unchanged) == (0, 0, 2500)
        moved = await world.service.import_inventory(a_list("m0001", datacenter="dc2"), "csv")
        assert (moved.added, moved.updated) == (0, 1)
        assert world.brokers.of("m0001").datacenter == "dc2"
        assert world.brokers.table.get("m0001").location.datacenter == "dc2"


async def test_an_import_with_errors_changes_nothing() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        with pytest.raises(InvalidInput, match="nothing was changed: line 3: machine") as caught:
            await world.service.import_inventory(a_list("m1", "m1", "M"), "csv")
        assert len(caught.value.errors) == 2
        await world.service.import_inventory(a_list("m1", "m2"), "csv", simulated=True)
        await assign(world.brokers.of("m1"), "m1", "online", "web")
        with pytest.raises(Conflict, match="m1 is in entitlement 'online': its place"):
            await world.service.import_inventory(a_list("m1", "m2", "m3", rack="r2"), "csv")
        assert "m3" not in list(world.brokers.table)
        assert world.brokers.table.get("m2").location.rack == "r1"
        with pytest.raises(InvalidInput, match="not UTF-8"):
            await world.service.import_inventory(b"\xff\xfe", "csv")


async def test_joining_completes_an_imported_machine() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.service.import_inventory(a_list("m1", datacenter="dc2"), "csv")
        record = world.brokers.table.get("m1")
        assert (record.state, record.facts) == (MachineState.DOWN, None)
        world.now = 2000.0
        record = await world.brokers.join(a_join("m1", "dc1"))  # the inventory takes precedence
        assert (record.state, record.joined_at) == (MachineState.UP, 2000.0)
        assert (record.location.datacenter, record.machine_type) == ("dc2", "web")
        assert record.facts is not None
        assert record.hardware is not None
        assert [e.end for e in record.unavailability] == [2000.0]


@pytest.mark.behaviour("RB3", "RB8", "RB11", "EL4")
async def test_machines_are_drained_lent_revoked_and_removed() -> None:
    async with MemoryStore() as store:
        world = await a_world(store)
        await world.brokers.add({f"m{i}": a_machine(f"m{i}", cluster="c1") for i in range(3)})
        request = Drain(
            scope=MachineScope(cluster="c1"),
            kind=EventKind.DECOMMISSION,
            reason="old",
            start_in_s=60.0,
            deadline_s=600.0,
        )
        drained = await world.service.drain(request)
        (event,) = drained.machines[0].unavailability
        assert (event.start, event.deadline) == (1060.0, 1660.0)
        await world.service.undrain(Undrain(machines=["m1", "m2"]))
        world.tasks["m2"] = ["web-0"]
        with pytest.raises(Conflict, match="still runs tasks"):
            await world.service.lend(Lend(machine="m2", borrower="batch"))
        with pytest.raises(NotFound, match="no entitlement 'unknown'"):
            await world.service.lend(Lend(machine="m1", borrower="unknown"))
        lent = await world.service.lend(Lend(machine="m1", borrower="batch"))
        assert (lent.entitlement, lent.profile_wanted) == ("batch", "offline")
        revoked = await world.service.revoke(Revoke(machines=["m1"], return_within_s=30.0))
        assert revoked.machines[0].loan is not None
        assert revoked.machines[0].loan.return_by == 1030.0
        with pytest.raises(Conflict, match="is not being decommissioned"):
            await world.service.remove("m0")  # not before its time is over
        world.now = 1060.0
        world.tasks["m0"] = ["web-1"]
        with pytest.raises(Conflict, match="it still runs web-1"):
            await world.service.remove("m0")
        world.tasks.clear()
        await world.service.remove("m0")
        assert list(world.brokers.table) == ["m1", "m2"]
