"""The control plane dies at every single write, and continues from its records."""

import asyncio
import logging
from collections import Counter

import pytest
from fake_agents import IMAGE_2, Region
from virtual_time import run
from world import World, a_job, a_region

from agent.api import TaskState
from control_plane.api.intent_changes import SizeChange
from control_plane.api.jobs import JobRecord, UpdatePolicy
from control_plane.api.people import Outcome
from control_plane.api.routes import ROUTES
from control_plane.front_end.recorder import Recorder
from control_plane.front_end.trail import Query, Trail
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.errors import Conflict, NotFound
from wire.fairness import Peer
from wire.server import Call

PUT_SIZE = next(route for route in ROUTES if route.name == "put_size")
SCALER = Peer(name="spiffe://twine/user/scaler", role="user")
SPEC = a_job(3, update=UpdatePolicy(drain_s=1))


class DyingStore(MemoryStore):
    """Stops the world at its n-th write, before or just after the write is durable."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.die_at, self.after = 0, False
        self.dead = asyncio.Event()

    async def txn(self, compare, operations) -> int:
        self.writes += 1
        if self.writes != self.die_at:
            return await super().txn(compare, operations)
        if self.after:
            await super().txn(compare, operations)
        self.dead.set()
        return await asyncio.get_running_loop().create_future()


async def living(world: World, body) -> None:
    """Run the body on the control plane. After a death, run it again on the successor."""
    while True:
        async with world.running():
            work = asyncio.create_task(body(world))
            death = asyncio.create_task(world.store.dead.wait())
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            if work.done():
                await work
                return
            work.cancel()
            await asyncio.wait([work])
            world.store.dead.clear()


async def deploy(w: World) -> None:
    await w.set_up()
    await w.cp.apply_job(SPEC)
    await w.stable()


async def update(w: World) -> None:
    await w.cp.apply_job(a_job(3, image=IMAGE_2, update=SPEC.update))
    await w.stable(within_s=300)


async def lose_a_machine(w: World) -> None:
    w.region.machines["m1"].power_off()
    await w.until(lambda: sum(w.alive().values()) == 3)
    await w.stable()


async def stop(w: World) -> None:
    try:
        await w.cp.stop_job("web")
    except NotFound:
        assert sum(w.alive().values()) == 0
    await w.until(lambda: sum(w.alive().values()) == 0)


def serving(region: Region) -> int:
    return sum(
        s.state is TaskState.RUNNING for m in region.machines.values() for s in m.tasks.values()
    )


async def life(die_at: int, after: bool, step) -> int:
    """Return how many writes the step took; die at one of them."""
    store = DyingStore()
    world = World(a_region(), store)
    await living(world, deploy)
    starts = Counter(t for m in world.region.machines.values() for t in m.starts)
    assert set(starts.values()) == {1}
    least = [3]

    async def watch() -> None:
        while True:
            least.append(serving(world.region))
            await asyncio.sleep(0.05)

    before = store.writes
    store.die_at, store.after = before + die_at, after
    watcher = asyncio.create_task(watch())
    await living(world, step)
    watcher.cancel()
    if step is update:
        assert min(least) >= 2  # within the budget, over the crash too
    assert world.region.broken_rules == []
    return store.writes - before


STEPS = [update, lose_a_machine, stop]


@pytest.mark.behaviour("F-60")
@pytest.mark.parametrize("after", [False, True], ids=["before-the-write", "after-the-write"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_crash_at_any_write_is_carried_on_from(step, after, caplog):  # invariant 5
    caplog.set_level(logging.ERROR)
    die_at, writes = 1, 1
    while die_at <= writes:
        writes = run(life(die_at, after, step))
        die_at += 1
    assert writes > 2
    assert caplog.records == []


async def deploy_dying(die_at: int, after: bool) -> int:
    store = DyingStore()
    store.die_at, store.after = die_at, after
    world = World(a_region(), store)
    await living(world, deploy)
    assert world.region.broken_rules == []
    copies = Counter(t for ts in world.region.where().values() for t in ts)
    assert copies == {"web-0": 1, "web-1": 1, "web-2": 1}
    return store.writes


@pytest.mark.parametrize("after", [False, True], ids=["before-the-write", "after-the-write"])
def test_a_crash_while_deploying_is_carried_on_from(after):
    die_at, writes = 1, 1
    while die_at <= writes:
        writes = run(deploy_dying(die_at, after))
        die_at += 1
    assert writes > 10


async def resized(die_at: int, after: bool) -> int:
    """Return how many writes four sizes took; die at one of them, and check the records."""
    store, acknowledged = DyingStore(), list[int]()
    world = World(a_region(), store)
    await living(world, deploy)

    async def sizes(w: World) -> None:
        trail = Trail(store, Runtime())
        await trail.load()
        recorder = Recorder(trail, w.cp.revision_of, ROUTES)

        async def put(call: Call) -> JobRecord:
            return await w.cp.intents.resize("web", call.body, "user:scaler", call.also)

        while len(acknowledged) < 4:
            request = SizeChange(tasks=2 + len(acknowledged) % 3)
            made = await recorder.carry_out(
                Call(PUT_SIZE, SCALER, request, {"job": "web"}, request_id="r"), put
            )
            acknowledged.append(made.intents["size"].version)
        stale = Call(PUT_SIZE, SCALER, SizeChange(tasks=2, expect=0), {"job": "web"})
        with pytest.raises(Conflict):
            await recorder.carry_out(stale, put)
        entries = (await trail.page(Query(object="job/web"))).entries
        assert entries[0].outcome is Outcome.FAILED
        assert {e.after for e in entries if e.outcome is Outcome.FAILED} == {None}
        made = [e for e in entries if e.outcome is not Outcome.FAILED]
        assert {e.outcome for e in made} == {Outcome.DONE}
        newest = w.cp._jobs.get("web").intents["size"].version
        assert len(made) == newest - 1  # each change has its entry; the job came with the first
        assert set(acknowledged) <= set(range(2, newest + 1))
        assert newest - 1 <= len(acknowledged) + 1
        revisions = [revision for e in reversed(made) for revision in (e.before, e.after)]
        assert revisions == sorted(revisions)
        await w.stable(within_s=300)

    before = store.writes
    store.die_at, store.after = before + die_at, after
    await living(world, sizes)
    assert world.region.broken_rules == []
    return store.writes - before


@pytest.mark.parametrize("after", [False, True], ids=["before-the-write", "after-the-write"])
def test_a_crash_at_any_write_leaves_sizes_with_their_audit_entries(after):
    """A size and its audit entry are written by one transaction, or neither is written."""
    die_at, writes = 1, 1
    while die_at <= writes:
        writes = run(resized(die_at, after))
        die_at += 1
    assert writes > 5


def test_a_restart_of_the_control_plane_restarts_no_task():  # P2
    async def main() -> None:
        world = World(a_region())
        async with world.running():
            await deploy(world)
        await asyncio.sleep(60)
        for _ in range(3):
            async with world.running():
                await asyncio.sleep(45)
                await world.stable()
                assert len(await world.endpoints()) == 3
        assert [len(m.starts) for m in world.region.machines.values()] == [1, 1, 1]
        assert world.store.epoch() == 4

    run(main())


@pytest.mark.behaviour("F-43")
def test_an_older_leader_is_refused_by_the_agents():  # invariant 3
    async def main() -> None:
        world = World(a_region())
        async with world.running():
            await deploy(world)
        for machine in world.region.machines.values():
            machine.epoch = 9  # a process with a later term was here
        async with world.running():
            await world.cp.apply_job(a_job(5))
            await asyncio.sleep(60)
            record = (await world.cp.get_job("web")).record
            assert "epoch 2 is old" in record.tasks[4].reason
        assert sum(world.alive().values()) == 3

    run(main())
