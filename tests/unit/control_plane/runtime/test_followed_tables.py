"""Tables of two processes on one store: each receives the other's writes, once and in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from inventory import assign
from msgspec.structs import replace

from agent.api import Location
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskRecord
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner
from control_plane.api.stored_jobs import CHUNK
from control_plane.broker.brokers import Brokers
from control_plane.broker.followed_machines import FollowedMachines
from control_plane.runtime.following import Followed, Following
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.store import Entry, Listing, Store
from control_plane.store.memory import MemoryStore

PATIENCE_S = 5.0


def owners(store: Store, writer: str) -> Table[EntitlementOwner]:
    return Table(store, "ownerships/", EntitlementOwner, "ownership", writer=writer)


def owner(name: str, shard: int) -> EntitlementOwner:
    return EntitlementOwner(entitlement=name, shard=shard)


async def put(table: Table[EntitlementOwner], name: str, shard: int | None) -> None:
    async with table.lock(name):
        await table.commit(name, None if shard is None else owner(name, shard))


@asynccontextmanager
async def followed(store: Store, *tables: Followed) -> AsyncIterator[Following]:
    """Follow a store with tables that are already loaded."""
    following = Following(store, tables)
    running = asyncio.create_task(following.run())
    try:
        yield following
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def caught_up(store: Store, following: Following) -> None:
    assert await following.wait_reached(store.revision(), PATIENCE_S)


@pytest.mark.behaviour("AL2")
async def test_each_process_observes_the_writes_of_the_other_and_its_own_once() -> None:
    """Each of two processes has a table and a listener."""
    async with MemoryStore() as store:
        here, there, changes = owners(store, "here"), owners(store, "there"), list[object]()
        here.listen(lambda name, before, after: changes.append((name, before, after)))
        async with followed(store, here) as one, followed(store, there) as other:
            await put(here, "a", 1)
            await caught_up(store, other)
            assert there.get("a") == owner("a", 1)
            await put(there, "a", 2)
            await put(there, "b", 3)
            await put(there, "b", None)
            await caught_up(store, one)
            await put(here, "a", 4)
            await caught_up(store, one)
        assert changes == [
            ("a", None, owner("a", 1)),
            ("a", owner("a", 1), owner("a", 2)),
            ("b", None, owner("b", 3)),
            ("b", owner("b", 3), None),
            ("a", owner("a", 2), owner("a", 4)),
        ]


async def test_the_echo_of_a_deleted_record_does_not_restore_it() -> None:
    async with MemoryStore() as store:
        here, changes = owners(store, "here"), list[object]()
        here.listen(lambda name, _, after: changes.append((name, after)))
        following = Following(store, [here])
        await put(here, "a", 1)
        await put(here, "a", None)
        running = asyncio.create_task(following.run())
        await caught_up(store, following)
        running.cancel()
        assert changes == [("a", owner("a", 1)), ("a", None)]
        assert len(here) == 0


@pytest.mark.behaviour("AL2")
async def test_a_process_lists_everything_again_after_a_compaction() -> None:
    """The history was compacted while the process did not follow. It finds deletions, too."""
    async with MemoryStore() as store:
        here, there = owners(store, "here"), owners(store, "there")
        for name, shard in (("a", 1), ("b", 1)):
            await put(there, name, shard)
        await here.load()
        following = Following(store, [here])
        await put(there, "a", 5)
        await put(there, "b", None)
        await put(there, "c", 1)
        await store.compact(store.revision())
        running = asyncio.create_task(following.run())
        await caught_up(store, following)
        running.cancel()
        assert {name: here.get(name).shard for name in here} == {"a": 5, "c": 1}


async def test_a_waiter_for_a_revision_sees_the_whole_transaction() -> None:
    async with MemoryStore() as store:
        here, there = owners(store, "here"), owners(store, "there")
        async with followed(store, here) as following:
            names = [f"e{n}" for n in range(20)]
            async with there.lock(*names):
                await there.commit_many({name: owner(name, 1) for name in names})
            await caught_up(store, following)
            assert list(here) == sorted(names)
            assert not await following.wait_reached(store.revision() + 1, 0.01)


async def test_a_job_that_another_process_writes_is_read_with_its_tasks() -> None:
    async with MemoryStore() as store:
        here, there = JobTable(store, writer="here"), JobTable(store, writer="there")
        async with followed(store, here) as one, followed(store, there) as other:
            spec = JobSpec(name="web", entitlement="front", tasks=1, image="sha256:" + "0" * 64)
            record = JobRecord(name="web", spec=spec, version=1, specs={1: spec}, created_at=1.0)
            tasks = [TaskRecord(index=0, version=1, generation=1)]
            async with there.lock("web"):
                await there.commit("web", replace(record, tasks=tasks))
            await caught_up(store, one)
            assert here.get("web") == there.get("web")
            assert here.expect(["web"]) == there.expect(["web"])
            async with here.lock("web"):
                await here.commit("web", replace(here.get("web"), stopping=True))
            await caught_up(store, other)
            assert there.get("web").stopping
            async with there.lock("web"):
                await there.commit("web", None)
            await caught_up(store, one)
            assert here.find("web") is None


@pytest.mark.behaviour("RB1")
async def test_a_machine_that_another_process_moves_is_never_gone() -> None:
    """The machine appears in the new data center before it leaves the old one. Listeners get one
    change."""
    async with MemoryStore() as store:
        here, there = (Brokers(store, Runtime(), writer=name) for name in ("here", "there"))
        changes: list[tuple[str, str]] = []

        def record_change(name: str, _: MachineRecord | None, after: MachineRecord | None) -> None:
            changes.append((name, after.location.datacenter if after is not None else "gone"))

        here.listen(record_change)
        async with followed(store, FollowedMachines(here, store)) as following:
            location = Location(datacenter="dc1", msb="m1", rack="r1")
            machine = MachineRecord(machine="m1", location=location, machine_type="small")
            await there.add({"m1": machine})
            await there.move("m1", "dc2")
            await caught_up(store, following)
            assert here.table.get("m1").location.datacenter == "dc2"
            assert changes == [("m1", "dc1"), ("m1", "dc2")]
            await assign(here.of("m1"), "m1", "web", "p")
            assert here.count("web") == 1


class Counted(MemoryStore):
    """Counts reads."""

    reads = 0

    async def get(self, key: str) -> Entry | None:
        self.reads += 1
        return await super().get(key)

    async def list_prefix(self, prefix: str, after: str = "", limit: int | None = None) -> Listing:
        self.reads += 1
        return await super().list_prefix(prefix, after, limit)


@pytest.mark.behaviour("SH10")
@pytest.mark.parametrize("seed", range(8))
async def test_a_follower_assembles_a_job_from_watched_parts(
    seed: int,
) -> None:
    """Following a job of another process costs no call to the store."""
    chance = random.Random(seed)
    async with Counted() as store:
        here, there = JobTable(store, writer="here"), JobTable(store, writer="there")
        spec = JobSpec(name="web", entitlement="front", tasks=1, image="sha256:" + "0" * 64)
        record = JobRecord(name="web", spec=spec, version=1, specs={1: spec}, created_at=1.0)
        async with followed(store, here) as following:
            async with there.lock("web"):
                await there.commit("web", replace(record, tasks=[task(0, 1)]))
            await caught_up(store, following)
            for version in range(2, 30):
                known = there.get("web")
                tasks = {one.index: one for one in known.tasks}
                for index in chance.sample(range(3 * CHUNK), 5):
                    if index in tasks and chance.random() < 0.5:
                        del tasks[index]
                    else:
                        tasks[index] = task(index, version)
                left = {f"m{chance.randrange(3)}": [f"web-{chance.randrange(3 * CHUNK)}"]}
                changed = replace(
                    known,
                    version=version if chance.random() < 0.5 else known.version,
                    tasks=[tasks[index] for index in sorted(tasks)],
                    leaving=left,
                    lasting=left if chance.random() < 0.5 else {},
                )
                async with there.lock("web"):
                    await there.commit("web", changed)
                reads = store.reads
                await caught_up(store, following)
                assert store.reads == reads
                assert here.get("web") == there.get("web")
                assert here.expect(["web"]) == there.expect(["web"])
        fresh = JobTable(store)
        await fresh.load()
        assert fresh.get("web") == here.get("web")
        async with here.lock("web"):
            await here.commit("web", None)  # the revisions of all parts are right


def task(index: int, version: int) -> TaskRecord:
    """Return a placed task."""
    placement = Placement(machine=f"m{index % 7}", ports={"http": 20_000 + version})
    return TaskRecord(index=index, version=version, generation=version, placement=placement)
