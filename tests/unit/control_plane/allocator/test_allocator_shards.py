"""Allocators that share a region; each has the entitlements of its shard."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from test_commit import HastyRuntime
from test_place import a_job

from agent.api import Limits, Location
from control_plane.allocator.allocator import Allocator
from control_plane.allocator.handover import adopt, read
from control_plane.allocator.standalone import allocator_over, allocator_shard
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.settings import PowerSettings, SchedulerSettings
from control_plane.broker.keys import prefix_of
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from control_plane.store.bulk import put_all
from control_plane.store.memory import MemoryStore
from control_plane.store.records import ENTITLEMENTS, encode
from wire.errors import Unprocessable

pytestmark = pytest.mark.behaviour("AL19")

GIB = 1 << 30
DATACENTERS = ("dc1", "dc2")
WHOLE = {"limits": Limits(memory_max_bytes=8 * GIB, cpu_max_cores=4.0)}


def machines(datacenter: str, each: int) -> list[MachineRecord]:
    return [
        MachineRecord(
            machine=f"{datacenter}-m{n}",
            location=Location(datacenter=datacenter, msb=f"msb{n % 2}"),
            machine_type="db" if n == 0 else "web",
            hardware=Hardware(cpus=4, rru=4.0, memory_bytes=10 * GIB, power_w=100),
        )
        for n in range(each)
    ]


@asynccontextmanager
async def shards(
    number: int,
    quota: int,
    each: int = 6,
    settings: SchedulerSettings | None = None,
    runtime: Runtime | None = None,
    **specs: EntitlementSpec,
) -> AsyncIterator[list[Allocator]]:
    """Run `number` allocators over the same two brokers, with one entitlement `front0`, … each.

    `specs` are other grants than the quota.
    """
    async with AsyncExitStack() as stack:
        brokers: dict[str, Store] = {}
        for datacenter in DATACENTERS:
            brokers[datacenter] = await stack.enter_async_context(MemoryStore())
            listed = machines(datacenter, each)
            keys = ((prefix_of(datacenter) + m.machine, encode(m)) for m in listed)
            await put_all(brokers[datacenter], keys)
        made: list[Allocator] = []
        for n in range(number):
            store = await stack.enter_async_context(MemoryStore())
            spec = specs.get(f"front{n}", EntitlementSpec(machines=quota))
            record = EntitlementRecord(name=f"front{n}", spec=spec)
            await put_all(store, [(ENTITLEMENTS + record.name, encode(record))])
            shard = (
                allocator_shard(made[0].region, store, f"allocator{n}")
                if made
                else allocator_over(store, brokers, settings, runtime=runtime)
            )
            made.append(await stack.enter_async_context(shard))
        yield made


def hosts(allocator: Allocator) -> set[str]:
    return {c.machine.name for claims in allocator.index.claims.values() for c in claims}


@pytest.mark.behaviour("AL19", "AL11")
@pytest.mark.parametrize("number", [2, 3])
async def test_each_shard_places_its_own_jobs_on_machines_of_every_broker(number):
    async with shards(number, quota=4) as allocators, asyncio.TaskGroup() as group:
        for n, allocator in enumerate(allocators):
            for job in range(2):
                spec = a_job(2, f"j{n}-{job}", entitlement=f"front{n}", **WHOLE)
                group.create_task(allocator.place(spec))
    used = [hosts(allocator) for allocator in allocators]
    assert [len(of) for of in used] == [4] * number
    assert len(set.union(*used)) == 4 * number, "no machine belongs to two shards"
    for of in used:
        assert {name.partition("-")[0] for name in of} == set(DATACENTERS)


@pytest.mark.behaviour("AL19")
async def test_a_shard_knows_only_its_own_entitlements():
    async with shards(2, quota=2) as (first, second):
        await first.place(a_job(2, "a", entitlement="front0", **WHOLE))
        with pytest.raises(Unprocessable, match="there is no entitlement 'front0'"):
            await second.place(a_job(1, "a", entitlement="front0"))
        assert "a" not in second.index.claims


@pytest.mark.behaviour("AL10", "AL19", "RB5")
async def test_another_shard_may_take_returned_machines():
    async with shards(2, quota=12) as (first, second):
        await first.place(a_job(12, "a", entitlement="front0", **WHOLE))
        assert len(hosts(first)) == 12
        made = await second.place(a_job(3, "b", entitlement="front1", **WHOLE))
        assert len(made.unplaced) == 3
        await first.forget("a")
        for machine in list(first.index.pool("front0").machines()):
            await first.give_back(machine)
        made = await second.place(a_job(3, "b", entitlement="front1", **WHOLE))
        assert not made.unplaced, made.reasons


@pytest.mark.behaviour("AL22", "BUG-AL33")
async def test_shards_of_one_process_count_power_together():
    """Each shard counted only its own tasks against a budget, and filled it."""
    power = PowerSettings(budgets_w={"dc1": 300, "dc2": 300}, overcommit=1.0)
    async with shards(2, 6, settings=SchedulerSettings(power=power)) as (first, second):
        one = await first.place(a_job(4, "a", entitlement="front0", **WHOLE))
        other = await second.place(a_job(4, "b", entitlement="front1", **WHOLE))
        assert (len(one.unplaced), len(other.unplaced)) == (0, 2)
        assert [b.used_w for b in first.index.power_budgets()] == [300, 300]
        gains = second.index.gains("front1")
        await first.forget("a")
        assert second.index.gains("front1") > gains  # tasks that wait there are tried again
        other = await second.place(a_job(4, "b", entitlement="front1", **WHOLE))
        assert not other.unplaced


@pytest.mark.behaviour("CP7", "BUG-AL33")
async def test_shards_of_one_process_keep_what_others_were_promised():
    """Each shard summed up only its own entitlements."""
    needs_db = EntitlementSpec(machines=2, machine_types=["db"])
    async with shards(2, 10, front1=needs_db) as (first, second):
        await first.place(a_job(10, "a", entitlement="front0", **WHOLE))
        assert not hosts(first) & {"dc1-m0", "dc2-m0"}
        other = await second.place(a_job(2, "b", entitlement="front1", **WHOLE))
        assert not other.unplaced


@pytest.mark.behaviour("CP7", "BUG-AL33")
async def test_shards_that_place_at_once_keep_what_a_third_was_promised():
    """Machines that one shard takes count for the others from the same step."""
    needs_db = EntitlementSpec(machines=1, machine_types=["db"])
    async with shards(3, 5, runtime=HastyRuntime(), front2=needs_db) as (first, second, third):
        made = await asyncio.gather(
            *(
                shard.place(a_job(1, pool, entitlement=pool, requires=[machine], **WHOLE))
                for shard, pool, machine in (
                    (first, "front0", "machine = dc1-m0"),
                    (second, "front1", "machine = dc2-m0"),
                )
            )
        )
        assert sorted(len(each.unplaced) for each in made) == [0, 1]
        other = await third.place(a_job(1, "c", entitlement="front2", **WHOLE))
        assert not other.unplaced


@pytest.mark.behaviour("CP6", "BUG-AL33")
async def test_a_shard_leaves_machines_to_what_waits_with_a_higher_priority_in_another():
    """Each shard knew only its own queue."""
    urgent = EntitlementSpec(machines=12, priority=900)
    async with shards(2, 12, front1=urgent) as (first, second):
        await first.place(a_job(12, "a", entitlement="front0", **WHOLE))
        waits = await second.place(a_job(1, "urgent", entitlement="front1", **WHOLE))
        assert waits.unplaced
        await first.place(a_job(11, "a", entitlement="front0", **WHOLE))
        (machine,) = (m for m in first.index.pool("front0").machines() if not m.jobs)
        await first.give_back(machine)
        one = await first.place(a_job(1, "more", entitlement="front0", **WHOLE))
        assert any("reserved for entitlement front1" in reason for reason in one.reasons)
        assert not (await second.place(a_job(1, "urgent", entitlement="front1", **WHOLE))).unplaced
        assert "more" in first.waiting.take_due()


async def test_other_shards_count_an_ended_shard_as_absent():
    needs_db = EntitlementSpec(machines=2, machine_types=["db"])
    async with shards(2, 12, front1=needs_db) as (first, second):
        await second.close()
        one = await first.place(a_job(12, "a", entitlement="front0", **WHOLE))
        assert not one.unplaced


async def test_waiting_jobs_of_a_pool_are_retried_after_it_moved_to_this_shard():
    """The pool's quota counts here from now on. More tasks may fit although no machine
    gained room.
    """
    async with shards(2, quota=2) as (first, second):
        before = second.index.gains("front0")
        adopt(second, "front0", await read(first, ["j0"]))
        assert second.index.gains("front0") > before
