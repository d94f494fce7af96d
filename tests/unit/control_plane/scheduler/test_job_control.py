"""Concurrent requests of owners, and requests while a store fails."""

import asyncio

import pytest
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.capacity import EntitlementSpec
from control_plane.store.memory import MemoryStore
from wire.errors import TwineError


class SlowStore(MemoryStore):
    """Delays every operation, so that other writers run in between."""

    async def get(self, key):
        await asyncio.sleep(0.01)
        return await super().get(key)

    async def txn(self, compare, operations) -> int:
        await asyncio.sleep(0.02)
        return await super().txn(compare, operations)


def attempts(count: int, body) -> None:
    """Run a body in new worlds, each with a different delay."""

    async def main() -> None:
        for number in range(count):
            world = World(a_region(), SlowStore())
            async with world.running():
                await world.set_up()
                await body(world, number * 0.004)

    run(main())


async def outcome(work) -> bool:
    try:
        await work
    except TwineError:
        return False
    return True


async def after(delay_s: float, work):
    await asyncio.sleep(delay_s)
    return await work


@pytest.mark.behaviour("BUG-CP8")
@pytest.mark.parametrize("delete_first", [False, True])
def test_no_job_is_left_without_its_entitlement(delete_first: bool) -> None:
    """All twelve attempts left such a job, in both orders."""

    async def body(w: World, delay_s: float) -> None:
        apply, delete = w.cp.apply_job(a_job(1)), w.cp.capacity.delete_entitlement("front")
        first, second = (delete, apply) if delete_first else (apply, delete)
        done = await asyncio.gather(outcome(first), outcome(after(delay_s, second)))
        assert sorted(done) == [False, True]
        jobs = [status.record.name for status in (await w.cp.list_jobs()).jobs]
        known = [
            view.record.name for view in (await w.cp.capacity.list_entitlements()).entitlements
        ]
        assert (jobs, known) in ((["web"], ["front"]), ([], []))

    attempts(12, body)


@pytest.mark.behaviour("BUG-CP8")
def test_one_of_two_creates_of_a_job_in_different_entitlements_is_refused() -> None:

    async def body(w: World, delay_s: float) -> None:
        await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=0, host_profile="web"))
        done = await asyncio.gather(
            outcome(w.cp.apply_job(a_job(0))),
            outcome(after(delay_s, w.cp.apply_job(a_job(0, entitlement="back")))),
        )
        assert done == [True, False]
        (status,) = (await w.cp.list_jobs()).jobs
        assert status.record.spec.entitlement == "front"

    attempts(4, body)


class HungStore(MemoryStore):
    """Hangs in writes of allocations on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.works = asyncio.Event()
        self.works.set()

    async def txn(self, compare, operations) -> int:
        if any(operation.key.startswith("allocations/") for operation in operations):
            await self.works.wait()
        return await super().txn(compare, operations)


@pytest.mark.behaviour("BUG-CP5")
def test_an_owner_gets_an_answer_while_an_allocation_hangs() -> None:
    """The job's lock is not held during an allocation."""

    async def main() -> None:
        store = HungStore()
        w = World(a_region(), store)
        async with w.running():
            await w.deployed(a_job(3))
            store.works.clear()
            await w.cp.apply_job(a_job(6))
            await asyncio.sleep(5)
            async with asyncio.timeout(1):
                await w.cp.apply_job(a_job(7))
            sick = next(iter(w.region.machines.values()))
            sick.reachable = False
            await w.until(lambda: w.endpoints_count(2))
            sick.reachable = True
            async with asyncio.timeout(1):
                await w.cp.stop_job("web")
            await w.until(lambda: w.endpoints_count(0))
            store.works.set()
            await w.until(lambda: w.cp._jobs.find("web") is None)
            assert "web" not in w.cp._allocator.index.claims

    run(main())
