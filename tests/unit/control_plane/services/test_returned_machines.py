"""Returned machines, and data centers whose stores fail, in a whole control plane."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import pytest
from fake_agents import find_image
from virtual_time import RUNTIME, run
from world import World, a_job, a_region, scenario

from control_plane.api.settings import SchedulerSettings
from control_plane.roles import ControlPlane
from control_plane.store import Operation, Store
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, UnknownOutcome


@pytest.mark.behaviour("BUG-AL7")
@scenario()
async def test_a_change_of_a_returned_machine_places_no_task_there(w):
    """A report of the agent cleared "is being given back", and a task started there."""
    await w.deployed(a_job(3))
    allocator = w.cp._allocator
    await w.cp.stop_job("web")
    await w.until(lambda: not any(m.jobs for m in allocator.index.machines.values()))
    machine = next(m for m in allocator.index.machines.values() if m.pool == "front")
    release, released = w.cp._broker.release, asyncio.Event()

    async def slowly(name: str, *, revision: int) -> object:
        await released.wait()
        return await release(name, revision=revision)

    w.cp._broker.release = slowly
    giving = asyncio.ensure_future(allocator.give_back(machine))
    await asyncio.sleep(0)
    w.cp._observations.changed(machine.name)
    assert machine.blocked == "is being given back"
    released.set()
    await giving
    assert (machine.pool, machine.blocked) == ("", "")


class SilentStore:
    """A store that now and then makes no write and reports no outcome."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner, self.is_silent = inner, False
        self.sent: list[tuple[Mapping[str, int], Sequence[Operation]]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        if self.is_silent:
            self.sent.append((compare, operations))
            raise UnknownOutcome("the store did not report the outcome of the write")
        return await self._inner.txn(compare, operations)

    async def make_late(self) -> None:
        """Make the first of these writes late."""
        await self._inner.txn(*self.sent[0])


@pytest.mark.parametrize("is_made", [True, False])
def test_a_machine_stays_blocked_while_the_outcome_of_its_release_is_unknown(is_made: bool):
    """Seed 5230: a machine was returned and the answer was lost. Tasks were sent there while the
    store had it without an owner.
    """

    async def body(w: World, store: SilentStore) -> None:
        await w.deployed(a_job(3))
        allocator = w.cp._allocator
        await w.cp.stop_job("web")
        await w.until(lambda: not any(m.jobs for m in allocator.index.machines.values()))
        machine = next(m for m in allocator.index.machines.values() if m.pool == "front")
        store.is_silent = True
        with pytest.raises(UnknownOutcome):
            await allocator.give_back(machine)
        if is_made:
            await store.make_late()
        w.cp._observations.changed(machine.name)
        await asyncio.sleep(3)
        assert (machine.pool, machine.blocked) == ("front", "is being given back")
        store.is_silent = False
        await asyncio.sleep(3)
        assert (machine.pool, machine.blocked) == ("" if is_made else "front", "")

    async def main() -> None:
        w = World(a_region(6))
        async with AsyncExitStack() as stack:
            store = SilentStore(await stack.enter_async_context(MemoryStore()))
            settings = SchedulerSettings(join_grace_s=0, give_back_after_s=600)
            w.cp = await stack.enter_async_context(
                ControlPlane(store, w.region.agent, RUNTIME, settings, find_image)
            )
            async with asyncio.timeout(3600):
                await body(w, store)

    run(main())


class FailingStore:
    """A store whose disk is sometimes full."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner, self.fails = inner, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        if self.fails:
            raise Busy("no space is left")
        return await self._inner.txn(compare, operations)


def with_failing_dc2(body: Callable[[World, FailingStore], object]) -> None:
    async def main() -> None:
        w = World(a_region(6))
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(MemoryStore())
            failing = FailingStore(await stack.enter_async_context(MemoryStore()))
            stores: dict[str, Store] = {"dc2": failing}
            settings = SchedulerSettings(join_grace_s=0)
            w.cp = await stack.enter_async_context(
                ControlPlane(
                    own, w.region.agent, RUNTIME, settings, find_image, broker_stores=stores
                )
            )
            async with asyncio.timeout(3600):
                await body(w, failing)

    run(main())


@pytest.mark.behaviour("BUG-CP5")
def test_a_job_is_stopped_while_the_store_of_one_data_center_fails():
    """`job stop` gave no answer for minutes, and readiness reported ok."""

    async def body(w: World, failing: FailingStore) -> None:
        await w.deployed(a_job(6), quota=6)
        failing.fails = True
        async with asyncio.timeout(20):
            await w.cp.stop_job("web")

    with_failing_dc2(body)


@pytest.mark.behaviour("BUG-CP5")
def test_a_job_gets_machines_of_answering_brokers_and_reasons_for_others():
    """Plans repeatedly chose machines of a broker that does not answer."""

    async def body(w: World, failing: FailingStore) -> None:
        await w.set_up(quota=6)
        failing.fails = True
        async with asyncio.timeout(20):
            await w.cp.apply_job(a_job(4))
        await w.stable()
        assert set(+w.alive()) <= {"m1", "m2", "m4", "m5"}
        failing.fails = False

    with_failing_dc2(body)
