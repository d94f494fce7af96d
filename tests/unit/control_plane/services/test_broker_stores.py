"""A data center's store is used only if it certainly has all machines of the data center."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from inventory import a_machine, loaded

from control_plane.broker.stores import OwnStore, claim, forget
from control_plane.store import Operation, Put, Store
from control_plane.store.memory import MemoryStore
from control_plane.store.records import encode
from wire.errors import ConfigError, NotFound

pytestmark = pytest.mark.behaviour("RB9")


class Stores:
    """A main store and a few others, all open, and the operations of a control plane on them."""

    def __init__(self, main: Store, others: Mapping[str, Store]) -> None:
        self.main, self.others = main, others

    async def start(self, **configured: str) -> list[str]:
        """Start with data center → name of its store; return the known machines."""
        own = {dc: OwnStore(self.others[name], f"/{name}") for dc, name in configured.items()}
        await claim(self.main, own)
        brokers = await loaded(self.main, {dc: found.store for dc, found in own.items()})
        return list(brokers.table)

    async def add(self, *machines: str, **configured: str) -> None:
        """Add machines named like `dc1-m1`."""
        stores = {dc: self.others[name] for dc, name in configured.items()}
        brokers = await loaded(self.main, stores)
        await brokers.add({name: a_machine(name, name.partition("-")[0]) for name in machines})

    async def refused(self, **configured: str) -> dict[str, str]:
        """Return why a start is refused, by data center; assert that it wrote nothing."""
        before = await self.written()
        with pytest.raises(ConfigError, match="cannot use the stores of data centers") as refusal:
            await self.start(**configured)
        assert await self.written() == before
        assert all(error.reason in str(refusal.value) for error in refusal.value.errors)
        found = {error.field: error.reason for error in refusal.value.errors}
        return {field.removeprefix("broker_stores."): why for field, why in found.items()}

    async def written(self) -> list[object]:
        return [(await s.list_prefix("")).entries for s in (self.main, *self.others.values())]


@pytest.fixture
def s() -> Stores:
    main, *others = [MemoryStore() for _ in range(4)]
    for store in (main, *others):
        asyncio.run(store.__aenter__())
    return Stores(main, dict(zip("abc", others, strict=True)))


async def test_machines_are_found_again_where_they_were_put(s: Stores) -> None:
    assert await s.start(dc1="a", dc2="b") == []
    await s.add("dc1-m1", "dc2-m1", "dc3-m1", dc1="a", dc2="b")
    for store, machine in ((s.others["a"], "dc1"), (s.others["b"], "dc2"), (s.main, "dc3")):
        keys = [entry.key for entry in (await store.list_prefix("machines/")).entries]
        assert keys == [f"machines/{machine}/{machine}-m1"]
    assert await s.start(dc1="a", dc2="b") == ["dc1-m1", "dc2-m1", "dc3-m1"]
    assert await s.start(dc1="a", dc2="b", dc4="c") == ["dc1-m1", "dc2-m1", "dc3-m1"]


async def test_without_stores_of_data_centers_nothing_is_written(s: Stores) -> None:
    await s.start()
    assert await s.written() == [(), (), (), ()]


async def test_machines_in_the_main_store_keep_their_data_center_there(s: Stores) -> None:
    await s.start(dc9="c")
    await s.add("dc1-m1", dc9="c")
    why = await s.refused(dc1="a", dc9="c")
    assert why.keys() == {"dc1"}
    assert "machines of dc1 in the main store" in why["dc1"]
    assert "twinectl machine delete" in why["dc1"]
    assert await s.start(dc9="c") == ["dc1-m1"]


async def test_those_that_an_earlier_release_stored_count_as_well(s: Stores) -> None:
    record = a_machine("m1", "dc1")
    await s.main.txn({}, [Put("machines/m1", encode(record))])
    with pytest.raises(ConfigError, match="machines of dc1 in the main store"):
        await s.start(dc1="a")


async def test_a_removed_line_is_detected(s: Stores) -> None:
    await s.start(dc1="a", dc2="b")
    assert await s.refused() == {
        "dc1": "is missing: the machines of dc1 are in a separate store, last at /a",
        "dc2": "is missing: the machines of dc2 are in a separate store, last at /b",
    }


async def test_a_disk_that_is_not_mounted_is_no_new_data_center(s: Stores) -> None:
    await s.start(dc1="a")
    why = await s.refused(dc1="b")
    assert "is empty at /b" in why["dc1"]
    assert "last at /a: is its disk mounted?" in why["dc1"]


async def test_a_store_may_be_moved_to_another_folder(s: Stores) -> None:
    await s.start(dc1="a")
    await s.add("dc1-m1", dc1="a")
    own = OwnStore(s.others["a"], "/elsewhere")
    await claim(s.main, {"dc1": own})
    assert await s.refused() == {
        "dc1": "is missing: the machines of dc1 are in a separate store, last at /elsewhere"
    }


async def test_exchanged_folders_are_reported(s: Stores) -> None:
    await s.start(dc1="a", dc2="b")
    assert await s.refused(dc1="b", dc2="a") == {
        "dc1": "is the store of dc2: /b",
        "dc2": "is the store of dc1: /a",
    }


async def test_the_store_of_another_control_plane_is_not_taken(s: Stores) -> None:
    other = Stores(s.others["c"], s.others)
    await other.start(dc1="a")
    assert "belongs to another control plane" in (await s.refused(dc1="a"))["dc1"]
    assert "/c holds something else" in (await s.refused(dc1="c"))["dc1"]


async def test_lost_machines_can_be_removed(s: Stores) -> None:
    await s.start(dc1="a")
    note = await forget(s.main, "dc1")
    assert (note.datacenter, note.folder) == ("dc1", "/a")
    with pytest.raises(NotFound):
        await forget(s.main, "dc1")
    assert await s.start() == []
    assert await s.start(dc1="b") == []  # empty, so it is used
    assert "is the store" in (await s.refused(dc2="b", dc1="a"))["dc2"]


class Dies(Exception):
    """The process ended here."""


class Mortal:
    """Stores of a process that dies at one of its writes, before or after the write is made."""

    def __init__(self, at: int, after: bool) -> None:
        self.left, self.after = at, after

    def around(self, inner: Store) -> Store:
        mortal = self

        class Through:
            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

            async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
                mortal.left -= 1
                if mortal.left == 0 and not mortal.after:
                    raise Dies
                revision = await inner.txn(compare, operations)
                if mortal.left == 0:
                    raise Dies
                return revision

        return Through()  # type: ignore[return-value]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("write", range(1, 6))
async def test_a_start_that_ends_at_any_write_does_not_block_the_next(
    s: Stores, write: int, after: bool
) -> None:
    outcome = Mortal(write, after)
    own = {
        dc: OwnStore(outcome.around(s.others[name]), f"/{name}")
        for dc, name in (("dc1", "a"), ("dc2", "b"))
    }
    with pytest.raises(Dies):  # the identity; the owner and the note of each store
        await claim(outcome.around(s.main), own)
    assert await s.start(dc1="a", dc2="b") == []
    await s.add("dc1-m1", dc1="a", dc2="b")
    assert await s.start(dc1="a", dc2="b") == ["dc1-m1"]
    assert (await s.refused()).keys() == {"dc1", "dc2"}
