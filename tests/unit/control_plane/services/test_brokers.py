"""Brokers: one per data center, one free pool, and all machines again after every restart."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from inventory import a_join, a_machine, a_region_of, assign, loaded

from control_plane.api.inventory import MachineScope
from control_plane.api.machine_commands import MarkDown, MarkUp
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.broker.broker import Broker
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.holds import Take
from control_plane.runtime.runtime import Runtime
from control_plane.store import Compacted, Operation, Put, Store
from control_plane.store.memory import MemoryStore
from control_plane.store.records import encode
from control_plane.store.sqlite import SqliteStore
from wire.errors import Conflict, NotFound


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "db")


@pytest.mark.behaviour("RB1")
async def test_each_data_center_has_a_broker_with_separate_keys(store: Store) -> None:
    async with store:
        brokers = await loaded(store)
        await brokers.join(a_join("m1", "dc1"))
        await brokers.join(a_join("m2", "dc2"))
        assert sorted(brokers.by_datacenter) == ["dc1", "dc2"]
        keys = [entry.key for entry in (await store.list_prefix("machines/")).entries]
        assert keys == ["machines/dc1/m1", "machines/dc2/m2"]
        again = await loaded(store)
        assert sorted(again.by_datacenter) == ["dc1", "dc2"]
        assert again.table.records() == brokers.table.records()


async def test_machines_of_an_earlier_release_are_moved_to_their_keys(store: Store) -> None:
    async with store:
        names = ["a", *(f"m{i}" for i in range(1200))]
        old = {n: a_machine(n, f"dc{i % 3}", entitlement="front") for i, n in enumerate(names)}
        await store.txn({}, [Put(f"machines/{n}", encode(r)) for n, r in old.items()])
        new = a_machine("m1200", "dc2")
        await store.txn({}, [Put("machines/dc2/m1200", encode(new))])
        old["m1200"] = new
        brokers = await loaded(store)
        assert {r.machine: r for r in brokers.table.records()} == old
        keys = [entry.key for entry in (await store.list_prefix("machines/")).entries]
        assert keys == sorted(f"machines/{r.location.datacenter}/{n}" for n, r in old.items())


@pytest.mark.behaviour("RB9")
async def test_a_data_center_may_have_a_separate_store() -> None:
    async with MemoryStore() as main, MemoryStore() as other:
        brokers = await loaded(main, {"dc2": other})
        await brokers.add({r.machine: r for r in (a_machine("m1"), a_machine("m2", "dc2"))})
        assert len((await main.list_prefix("machines/")).entries) == 1
        assert len((await other.list_prefix("machines/")).entries) == 1
        again = await loaded(main, {"dc2": other})
        assert list(again.table) == ["m1", "m2"]


@pytest.mark.behaviour("MO2")
async def test_machines_are_found_by_every_level_of_the_topology() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        await brokers.add(a_region_of(datacenters=2, msbs=2, rows=2, racks=2, machines=2))
        total = len(brokers.table)
        assert total == 32
        assert len(await brokers.scan(MachineScope(region="local"))) == total
        assert len(await brokers.scan(MachineScope(datacenter="dc1"))) == total // 2
        assert len(await brokers.scan(MachineScope(msb="dc1-msb0"))) == total // 4
        assert len(await brokers.scan(MachineScope(row="dc1-msb0-row1"))) == total // 8
        assert len(await brokers.scan(MachineScope(rack="dc0-msb1-row1-rack0"))) == total // 16
        assert (
            len(await brokers.scan(MachineScope(datacenter="dc0", machine_type="web")))
            == total // 2
        )
        assert await brokers.scan(MachineScope(datacenter="dc0", rack="dc1-msb0-row0-rack0")) == []
        assert await brokers.scan(MachineScope(datacenter="elsewhere")) == []
        await assign(brokers.of("m00001"), "m00001", "front", "web")
        assert [m.machine for m in await brokers.scan(MachineScope(entitlement="front"))] == [
            "m00001"
        ]
        assert len(await brokers.scan(MachineScope(entitlement=FREE))) == total - 1
        await brokers.carry_out("m00003", MarkDown(reason="test"))
        assert [m.machine for m in await brokers.scan(MachineScope(state=MachineState.DOWN))] == [
            "m00003"
        ]


@pytest.mark.behaviour("RB2", "RB7", "MO9", "MO10")
async def test_all_brokers_form_one_free_pool() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        await brokers.add({f"m{i}": a_machine(f"m{i}", f"dc{i % 3}") for i in range(6)})
        assert [r.machine for r in brokers.held(FREE)] == [f"m{i}" for i in range(6)]
        for name in ("m1", "m2"):
            await assign(brokers.of(name), name, "front", "web")
        assert [r.machine for r in brokers.held("front")] == ["m1", "m2"]
        assert (brokers.count(FREE), brokers.count("front")) == (4, 2)
        for name in ("m1", "m2"):
            await brokers.release(name, revision=brokers.table.revision(name))
        assert brokers.count(FREE) == 6


async def test_a_free_machine_moves_to_another_data_center_and_no_other() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        await brokers.join(a_join("m1", "dc1"))
        seen = []
        brokers.listen(lambda name, before, after: seen.append((name, before, after)))
        moved = await brokers.join(a_join("m1", "dc2"))
        assert moved.location.datacenter == "dc2"
        assert brokers.of("m1").datacenter == "dc2"
        assert all(before is not None and after is not None for _, before, after in seen)
        await assign(brokers.of("m1"), "m1", "front", "web")
        with pytest.raises(Conflict, match=r"cannot move machine 'm1' from dc2 to dc1: it is in"):
            await brokers.join(a_join("m1", "dc1"))
        assert brokers.of("m1").datacenter == "dc2"


async def test_a_move_that_is_interrupted_leaves_one_machine() -> None:
    async with MemoryStore() as main, MemoryStore() as other:
        stores = {"dc2": other}
        brokers = await loaded(main, stores)
        await brokers.join(a_join("m1", "dc1"))

        home = brokers.of("m1").table
        home._slots.store, real = _Failing(), home.store
        with pytest.raises(ConnectionError):
            await brokers.join(a_join("m1", "dc2"))
        assert len((await main.list_prefix("machines/")).entries) == 1
        assert len((await other.list_prefix("machines/")).entries) == 1
        changes_of_table = []
        again = Brokers(main, Runtime(lambda: 0.0), stores)
        again.listen(lambda name, before, after: changes_of_table.append((before, after)))
        await again.load()
        assert again.of("m1").datacenter == "dc2"
        assert (await main.list_prefix("machines/")).entries == ()
        assert changes_of_table[-1][1].location.datacenter == "dc2"
        home._slots.store = real
        await brokers.join(a_join("m2", "dc1"))  # the first process continues too
        assert brokers.of("m1").datacenter == "dc2"


async def test_a_name_is_one_machine_even_if_two_join_at_once() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        await asyncio.gather(*(brokers.join(a_join("m1", f"dc{i}")) for i in range(5)))
        assert len(brokers.table) == 1
        assert len((await store.list_prefix("machines/")).entries) == 1


@pytest.mark.behaviour("RB4", "AL2")
async def test_subscribers_get_every_change_after_the_list(store: Store) -> None:
    async with store:
        broker = Broker(store, Runtime(lambda: 1.0), "dc1")
        await broker.load()
        await broker.put_many({f"m{i}": a_machine(f"m{i}") for i in range(3)})
        revision = broker.table.latest
        await broker.carry_out({"m1": MarkDown(reason="test")})
        await assign(broker, "m0", "front", "web")
        changes = []
        async for change in broker.table.watch(revision):
            changes.append(change)
            if len(changes) == 3:
                break
        # the machine is assigned in two steps: it is held first
        assert [name for name, _, _ in changes] == ["m1", "m0", "m0"]
        assert changes[2][1] is broker.table.get("m0")  # the same object, decoded once
        waiting = asyncio.create_task(anext(aiter(broker.table.watch(changes[2][2]))))
        await asyncio.sleep(0)
        assert not waiting.done()
        await broker.carry_out({"m1": MarkUp()})
        assert (await waiting)[0] == "m1"


@pytest.mark.behaviour("RB4", "AL2", "F-62")
async def test_a_subscriber_too_far_behind_must_list_again() -> None:
    async with MemoryStore() as store:
        broker = Broker(store, Runtime(lambda: 1.0), "dc1")
        await broker.load()
        await broker.put_many({"m1": a_machine("m1")})
        revision = broker.table.latest
        broker.table._history.clear()
        await broker.carry_out({"m1": MarkDown(reason="test")})
        broker.table._history.clear()
        with pytest.raises(Compacted):
            await anext(aiter(broker.table.watch(revision)))
    async with store:  # another life of the broker; its earlier counts are void
        again = Broker(store, Runtime(lambda: 1.0), "dc1")
        await again.load()
        with pytest.raises(Compacted):
            await anext(aiter(again.table.watch(revision)))


@pytest.mark.behaviour("RB12", "AL11")
async def test_two_allocators_never_get_the_same_machine(store: Store) -> None:
    async with store:
        brokers = await loaded(store)
        await brokers.add({f"m{i:02}": a_machine(f"m{i:02}", f"dc{i % 3}") for i in range(30)})

        async def allocator(number: int) -> list[str]:
            """Take six machines: one by one from the pool, or by holding several at once."""
            got: list[str] = []
            for attempt in range(60):
                names = [r.machine for r in brokers.held(FREE) if r.hold is None][:3]
                if not names or len(got) >= 6:
                    break
                await asyncio.sleep(0)
                try:
                    if number % 2:
                        name = names[0]
                        await assign(brokers.of(name), name, f"e{number}", "web")
                        got.append(name)
                    else:
                        transaction = f"t{number}-{attempt}"
                        takes = dict.fromkeys(names, Take(f"e{number}", "web"))
                        await brokers.prepare(transaction, takes)
                        got += [r.machine for r in await brokers.commit(transaction)]
                except Conflict:
                    await asyncio.sleep(0)
            return got

        got = await asyncio.gather(*(allocator(number) for number in range(12)))
        names = [name for part in got for name in part]
        assert len(names) == len(set(names)) == 30
        for number, part in enumerate(got):
            assert sorted(part) == [r.machine for r in brokers.held(f"e{number}")]
        assert brokers.in_doubt() == {}


@pytest.mark.behaviour("RB12")
async def test_two_processes_on_one_store_never_assign_one_machine_twice() -> None:
    async with MemoryStore() as store:
        first, second = (
            Broker(store, Runtime(lambda: 1.0), "dc1"),
            Broker(store, Runtime(lambda: 1.0), "dc1"),
        )
        await first.load()
        await first.put_many({f"m{i:02}": a_machine(f"m{i:02}") for i in range(20)})
        await second.load()

        async def take_all(broker: Broker, entitlement: str) -> list[str]:
            got = []
            for name in broker.table:
                try:
                    await assign(broker, name, entitlement, "web")
                    got.append(name)
                except Conflict:  # it has now read the other process's write
                    record = broker.table.get(name)
                    holder = record.hold.entitlement if record.hold is not None else FREE
                    assert (record.entitlement or holder) not in (FREE, entitlement)
                await asyncio.sleep(0)
            return got

        one, two = await asyncio.gather(take_all(first, "a"), take_all(second, "b"))
        assert len(one) + len(two) == 20
        assert not set(one) & set(two)


async def test_the_outcome_of_a_cancelled_write_is_known(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path) as store:
        broker = Broker(store, Runtime(lambda: 1.0), "dc1")
        await broker.load()
        await broker.put_many({"m1": a_machine("m1")})
        writer = asyncio.create_task(broker.carry_out({"m1": MarkDown(reason="test")}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        writer.cancel()
        await asyncio.wait([writer])
        for _ in range(3):
            try:
                await broker.carry_out({"m1": MarkDown(reason="again")})
                break
            except Conflict:
                continue
        entry = await store.get("machines/dc1/m1")
        assert entry is not None
        assert entry.revision == broker.table.revision("m1")
        assert broker.table.get("m1").state is MachineState.DOWN


async def test_unknown_properties_cannot_be_required() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        with pytest.raises(NotFound, match="there is no machine 'm9'"):
            brokers.table.get("m9")
        with pytest.raises(NotFound):
            await brokers.carry_out("m9", MarkDown(reason="test"))


class _Failing:
    async def txn(self, *_: object) -> int:
        raise ConnectionError("killed")


@pytest.mark.parametrize("write", [1, 2])
@pytest.mark.parametrize("made", [False, True])
async def test_listeners_have_the_true_state_after_a_failed_move(write: int, made: bool) -> None:
    class Failing(MemoryStore):
        fails_in = 0

        async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
            self.fails_in -= 1
            if self.fails_in == 0 and not made:
                raise OSError("no space left on device")
            revision = await super().txn(compare, operations)
            if self.fails_in == 0:
                raise OSError("the disk did not answer")
            return revision

    changes: dict[str, MachineRecord] = {}

    def listen(name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        assert before == changes.pop(name, None)
        if after is not None:
            changes[name] = after

    async with Failing() as store:
        brokers = await loaded(store)
        brokers.listen(listen)
        await brokers.add({"m1": a_machine("m1")})
        store.fails_in = write
        with pytest.raises(OSError, match=r"no space|did not answer"):
            await brokers.move("m1", "dc2")
        with contextlib.suppress(NotFound):  # only now the disk shows where it was
            await brokers.carry_out("m1", MarkDown(reason="it went away meanwhile"))
        await brokers.add({"m2": a_machine("m2")})  # this completes the move first
        again = await loaded(store)
        (m1, _) = again.table.records()
        assert changes == {r.machine: r for r in brokers.table.records()}
        assert changes["m1"] == m1
        assert m1.location.datacenter == ("dc1" if (write, made) == (1, False) else "dc2")


async def test_a_machine_whose_adding_failed_late_is_not_added_elsewhere_too() -> None:
    """The write was made and its caller got an error. The next caller learns of it."""

    class Silent(MemoryStore):
        answers = True

        async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
            revision = await super().txn(compare, operations)
            if not self.answers:
                raise OSError("the disk did not answer")
            return revision

    async with Silent() as store:
        brokers = await loaded(store)
        store.answers = False
        with pytest.raises(OSError, match="did not answer"):
            await brokers.add({"m1": a_machine("m1", "dc1")})
        store.answers = True
        with pytest.raises(Conflict, match="m1 is already known"):
            await brokers.add({"m1": a_machine("m1", "dc2")})
        assert brokers.of("m1").datacenter == "dc1"
        assert (await loaded(store)).table.records() == brokers.table.records()
