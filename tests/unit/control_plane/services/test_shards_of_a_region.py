"""Three shards in one process: the owners of entitlements, and moves between shards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from virtual_time import run
from world import World, a_job, a_region

from agent.api import Limits
from control_plane.allocator import handover
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.ownership import ShardLoad
from control_plane.shards.core.scopes import least_loaded_first
from control_plane.store import Operation
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, ConfigError, Conflict, NotFound

pytestmark = pytest.mark.behaviour("SH1", "SH3", "SH4", "AV7")

POOLS = ("e0", "e1", "e2")


@asynccontextmanager
async def three(store: MemoryStore | None = None, **more: object) -> AsyncIterator[World]:
    """Run a region of nine machines with an entitlement and a job of two tasks in each shard."""
    w = World(a_region(9), store or MemoryStore(strict=True), **({"shards": 3} | more))
    async with w.running():
        for machine in w.region.machines.values():
            await w.cp.joined(machine.join())
        for pool in POOLS:
            spec = EntitlementSpec(machines=3, host_profile="web")
            await w.cp.capacity.put_entitlement(pool, spec)
            await w.cp.apply_job(a_job(2, name=f"job-{pool}", entitlement=pool))
            await w.stable(f"job-{pool}")
        yield w


def owners(w: World, pool: str) -> list[int]:
    return [s.number for s in w.cp.shards.all if s.allocator.region.owns(pool)]


def claims(w: World, name: str) -> dict[int, int]:
    """Return how many tasks of a job each shard's allocator counts."""
    found = {s.number: s.allocator.index.claims.get(name) for s in w.cp.shards.all}
    return {number: len(of) for number, of in found.items() if of is not None}


def starts(w: World) -> dict[str, list[str]]:
    """Return every task that was ever started, by machine."""
    return {name: list(machine.starts) for name, machine in w.region.machines.items()}


@pytest.mark.behaviour("SH2")
def test_a_new_entitlement_goes_to_the_shard_with_the_least_to_do() -> None:
    """All shards are listed as one region."""

    async def main() -> None:
        async with three() as w:
            assert [owners(w, pool) for pool in POOLS] == [[0], [1], [2]]
            assert [claims(w, f"job-{pool}") for pool in POOLS] == [{0: 2}, {1: 2}, {2: 2}]
            assert [one.record.name for one in (await w.cp.list_jobs()).jobs] == [
                f"job-{pool}" for pool in POOLS
            ]
            loads = w.cp.shards.loads()
            assert [(one.entitlements, one.jobs, one.tasks) for one in loads] == [
                ([pool], 1, 2) for pool in POOLS
            ]

    run(main())


@pytest.mark.behaviour("SH2")
def test_the_measure_of_load_is_machines_held_or_promised_then_jobs() -> None:

    def load(shard: int, machines: int, jobs: int) -> ShardLoad:
        return ShardLoad(shard=shard, load=machines, jobs=jobs)

    assert least_loaded_first([load(0, 9, 1), load(1, 8, 2), load(2, 20, 0)]) == [1, 0, 2]
    assert least_loaded_first([load(0, 8, 2), load(1, 8, 1)]) == [1, 0]
    assert least_loaded_first([load(0, 0, 0), load(1, 0, 0)]) == [0, 1]


def test_no_task_restarts_when_its_entitlement_moves() -> None:
    async def main() -> None:
        async with three() as w:
            before, number = starts(w), w.cp.ownership.number()
            planned = await w.cp.shards.move("e1", 2, dry_run=True)
            assert (planned.done, planned.jobs, owners(w, "e1")) == (False, ["job-e1"], [1])
            moved = await w.cp.shards.move("e1", 2)
            assert (moved.done, moved.from_shard, moved.to_shard) == (True, 1, 2)
            assert (owners(w, "e1"), claims(w, "job-e1")) == ([2], {2: 2})
            assert w.cp.ownership.number() == number + 1
            await asyncio.sleep(120)
            assert starts(w) == before
            await w.cp.apply_job(a_job(3, name="job-e1", entitlement="e1"))
            await w.until(lambda: claims(w, "job-e1") == {2: 3})
            await w.stable("job-e1")
            assert not (await w.cp.shards.move("e1", 2)).done

    run(main())


@pytest.mark.behaviour("SH4")
def test_the_owner_of_a_restart_is_the_one_of_the_map() -> None:
    """Moved entitlements stay moved, and shards that do not run any more are reported."""

    async def main() -> None:
        store = MemoryStore(strict=True)
        async with three(store) as w:
            await w.cp.shards.move("e0", 2)
            before = starts(w)
        again = World(w.region, store, shards=3)
        async with again.running():
            await again.stable("job-e0")
            assert (owners(again, "e0"), claims(again, "job-e0")) == ([2], {2: 2})
            assert starts(again) == before
        with pytest.raises(ConfigError, match="shards = 2: 2 entitlements are in later ones"):
            async with World(w.region, store, shards=2).running():
                pass
        gone = World(w.region, store, shards=3)
        async with gone.running():
            await gone.cp.shards.move("e2", 0)
            await gone.cp.stop_job("job-e0")
            await gone.until(lambda: not claims(gone, "job-e0"))
            await gone.until(lambda: gone.cp._jobs.find("job-e0") is None)
            await gone.cp.capacity.delete_entitlement("e0")
        fewer = World(w.region, store, shards=2)
        async with fewer.running():
            assert (owners(fewer, "e0"), owners(fewer, "e2")) == ([0], [0])

    run(main())


@pytest.mark.behaviour("SH4")
@pytest.mark.parametrize("after", [False, True])
def test_a_process_that_ends_in_a_move_leaves_one_owner(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Before the write of the new owner, the old shard is the owner; after it, the new shard is."""

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    async def main() -> None:
        store = MemoryStore(strict=True)
        async with three(store) as w:
            before = starts(w)
            if after:
                monkeypatch.setattr(handover, "drop", killed)
            else:
                monkeypatch.setattr(w.cp.ownership, "move", killed)
            with pytest.raises(Killed):
                await w.cp.shards.move("e1", 0)
        monkeypatch.undo()
        again = World(w.region, store, shards=3)
        async with again.running():
            await again.stable("job-e1")
            owner = 0 if after else 1
            assert (owners(again, "e1"), claims(again, "job-e1")) == ([owner], {owner: 2})
            assert starts(again) == before

    run(main())


def test_unfinished_work_keeps_an_entitlement_in_its_shard() -> None:
    async def main() -> None:
        async with three() as w:
            source = w.cp.shards.all[1]
            source.scheduler.requests.asking.add("job-e1")
            moving = asyncio.create_task(w.cp.shards.move("e1", 0))
            await w.until(lambda: w.cp.ownership.moving)
            assert owners(w, "e1") == [], "no shard begins anything meanwhile"
            with pytest.raises(Busy, match="nothing was changed"):
                await moving
            source.scheduler.requests.asking.clear()
            assert owners(w, "e1") == [1]
            await w.cp.apply_job(a_job(3, name="job-e1", entitlement="e1"))
            await w.until(lambda: claims(w, "job-e1") == {1: 3})

    run(main())


def test_a_job_lives_in_one_shard() -> None:
    async def main() -> None:
        async with three() as w:
            with pytest.raises(Conflict, match="a job belongs to one shard"):
                await w.cp.move_job("job-e0", "e1")
            with pytest.raises(NotFound, match="there is no shard 3"):
                await w.cp.shards.move("e1", 3)
            with pytest.raises(NotFound, match="there is no entitlement"):
                await w.cp.shards.move("unknown", 1)
            await w.cp.shards.move("e1", 0)
            await w.cp.move_job("job-e0", "e1")
            with pytest.raises(Conflict, match="is moving between it and e1"):
                await w.cp.shards.move("e0", 2)
            await w.stable("job-e0")

    run(main())


@pytest.mark.behaviour("BUG-CP61")
def test_a_job_that_is_being_written_into_an_entitlement_keeps_it_in_its_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store had made the transfer. The entitlement moved while the answer was pending."""

    async def main() -> None:
        async with three() as w:
            await w.cp.shards.move("e1", 0)
            store, written, answered = w.cp._jobs.store, asyncio.Event(), asyncio.Event()
            write = store.txn

            async def late(compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
                revision = await write(compare, operations)
                if any(each.key == "jobs/job-e0" for each in operations):
                    written.set()
                    await answered.wait()
                return revision

            monkeypatch.setattr(store, "txn", late)
            transfer = asyncio.create_task(w.cp.move_job("job-e0", "e1"))
            await written.wait()
            moving = asyncio.create_task(w.cp.shards.move("e1", 2))
            await asyncio.sleep(1.0)
            answered.set()
            await transfer
            with pytest.raises(Conflict, match="is moving between it and e0"):
                await moving
            await w.stable("job-e0")

    run(main())


@pytest.mark.behaviour("BUG-CP62")
@pytest.mark.parametrize("moved", ["e0", "e1"])
def test_a_copy_that_a_transfer_left_on_a_lost_machine_keeps_both_in_one_shard(moved: str) -> None:
    """No shard stopped the copy once its machine was back."""

    async def main() -> None:
        async with three() as w:
            await w.cp.shards.move("e1", 0)
            first = w.cp._jobs.get("job-e0").tasks[0].placement
            assert first is not None
            lost = first.machine
            w.region.machines[lost].power_off()
            await w.until(lambda: lost in w.cp._jobs.get("job-e0").leaving)
            await w.stable("job-e0")
            await w.cp.move_job("job-e0", "e1")
            await w.stable("job-e0")
            with pytest.raises(Conflict, match="is moving between it and"):
                await w.cp.shards.move(moved, 2)
            w.region.machines[lost].power_on()
            await w.until(lambda: not w.cp._jobs.get("job-e0").leaving)
            await w.cp.shards.move(moved, 2)

    run(main())


@pytest.mark.behaviour("SH3")
@pytest.mark.parametrize("moved", ["e0", "e1"])
def test_no_job_moves_from_or_to_an_entitlement_in_transfer(moved: str) -> None:
    """The check was made before the lock only, so a job ended in no shard."""

    async def main() -> None:
        async with three() as w:
            await w.cp.shards.move("e1", 0)
            await asyncio.sleep(5.0)  # its new shard has sent its first requests
            asking = w.cp.shards.all[0].scheduler.requests.asking
            asking.add(f"job-{moved}")
            moving = asyncio.create_task(w.cp.shards.move(moved, 2))
            await w.until(lambda: w.cp.ownership.moving)
            transfer = asyncio.create_task(w.cp.move_job("job-e0", "e1"))
            await asyncio.sleep(0.1)
            asking.clear()
            await moving
            with pytest.raises(
                (Busy, Conflict), match=r"is moving to another shard|belongs to one shard"
            ):
                await transfer
            assert (await w.cp.get_job("job-e0")).record.spec.entitlement == "e0"

    run(main())


@pytest.mark.behaviour("CP7", "AL19")
def test_a_shard_takes_no_machine_that_another_shard_was_promised() -> None:
    """`e0` may only have machines of dc2, and gets all three although `e1` grew first."""

    async def main() -> None:
        w = World(a_region(9), shards=2)
        async with w.running():
            for machine in w.region.machines.values():
                await w.cp.joined(machine.join())
            most = max(machine.memory_bytes for machine in w.region.machines.values())
            whole = Limits(memory_max_bytes=most // 2)
            bound = EntitlementSpec(machines=3, datacenter="dc2", host_profile="web")
            await w.cp.capacity.put_entitlement("e0", bound)
            await w.cp.capacity.put_entitlement(
                "e1", EntitlementSpec(machines=6, host_profile="web")
            )
            await w.cp.apply_job(a_job(1, name="first", entitlement="e0", limits=whole))
            await w.stable("first")
            await w.cp.apply_job(a_job(6, name="large", entitlement="e1", limits=whole))
            await w.stable("large")
            assert (owners(w, "e0"), owners(w, "e1")) == ([0], [1])
            held = {r.location.datacenter for r in w.cp._broker.held("e1")}
            assert held == {"dc1"}, "spread over both would have broken the promise"
            await w.cp.apply_job(a_job(3, name="first", entitlement="e0", limits=whole))
            await w.stable("first")
            assert len(w.cp._broker.held("e0")) == 3

    run(main())
