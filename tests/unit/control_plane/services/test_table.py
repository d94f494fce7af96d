"""How a table is read at the start."""

import asyncio

from inventory import a_join
from msgspec.structs import replace

from control_plane.api.machines import Hold, MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.inventory import joined_record
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import PAGE, Table, pages
from control_plane.store import Listing, Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import encode


def machine(name: str, **fields: object) -> Put:
    record = replace(joined_record(None, a_join(name, "dc1"), 0.0), **fields)
    return Put(f"machines/dc1/{name}", encode(record))


async def test_the_next_page_is_read_while_the_present_one_is_worked_on() -> None:
    class Watched(MemoryStore):
        reads = 0

        async def list_prefix(
            self, prefix: str, after: str = "", limit: int | None = None
        ) -> Listing:
            self.reads += 1
            return await super().list_prefix(prefix, after, limit)

    async with Watched() as store:
        await store.txn({}, [Put(f"a/{i:05}", b"") for i in range(2 * PAGE + 1)])
        sizes, begun = [], []
        async for page in pages(store, "a/"):
            sizes.append(len(page))
            begun.append(store.reads)
        assert sizes == [PAGE, PAGE, 1]
        assert begun == [2, 3, 3]


async def test_listeners_are_notified_of_bulk_and_single_reads() -> None:
    async with MemoryStore() as store:
        await store.txn({}, [machine(f"m{i:05}") for i in range(PAGE + 2)])
        table = Table(store, "machines/dc1/", MachineRecord, "machine")
        page_sizes: list[int] = []
        single: list[str] = []
        changed: list[str] = []

        def loaded(records: object) -> None:
            assert isinstance(records, dict)
            assert all(table.find(name) is record for name, record in records.items())
            page_sizes.append(len(records))

        table.listen(lambda name, *_: changed.append(name), loaded)
        table.listen(lambda name, *_: single.append(name))
        await table.load()
        assert page_sizes == [PAGE, 2]
        assert changed == []
        assert single == [f"m{i:05}" for i in range(PAGE + 2)]


async def test_brokers_know_holders_after_the_start_and_notify_each_machine() -> None:
    hold = Hold(transaction="t1", entitlement="web", profile="", since=0.0)
    async with MemoryStore() as store:
        one, two = machine("m1", entitlement="web"), machine("m2", hold=hold)
        await store.txn({}, [one, two])
        brokers, changes = Brokers(store, Runtime(lambda: 0.0)), []
        brokers.listen(lambda name, before, after: changes.append((name, before, after)))
        await asyncio.wait_for(brokers.load(), 10)
        assert [record.machine for record in brokers.held("web")] == ["m1"]
        assert (brokers.count("web"), brokers.count("")) == (1, 1)
        assert brokers.in_doubt() == {"t1": ["m2"]}
        assert changes == [(name, None, brokers.table.get(name)) for name in ("m1", "m2")]
