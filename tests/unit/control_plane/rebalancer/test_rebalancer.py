"""The ReBalancer in a region: it plans, has tasks move like any operation, and can be paused."""

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from virtual_time import run
from world import World, a_job, a_region

from agent.api import Limits
from agent.api.volumes import Volume, VolumeKind
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import UpdatePolicy
from control_plane.api.operations import Cause
from control_plane.api.policy import Fit, Neighbour
from control_plane.api.rebalancing import MoveState, PauseWish
from control_plane.api.settings import RebalanceMode, RebalanceSettings
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.core.solving import solve
from control_plane.roles import ControlPlane
from control_plane.scheduler.rebalance_desk import RebalanceDesk
from wire.errors import NotFound


async def solved_here(model: RegionModel, effort: Effort) -> SolverAnswer:
    """Solve in this process, with a number of steps instead of a time."""
    return solve(model, Effort(steps=500, moves=effort.moves), time.monotonic)


class Rebalanced(World):
    """A region of twelve machines in which one job is packed on few of them."""

    def __init__(self, mode: RebalanceMode = RebalanceMode.APPLY, **changes) -> None:
        knobs = {"mode": mode, "every_s": 60.0, "settle_s": 0.0, "moves_per_s": 5.0}
        knobs |= {"hot_from": 0.6} | changes
        super().__init__(a_region(12), rebalance=RebalanceSettings(**knobs))

    def control_plane(self) -> ControlPlane:
        made = super().control_plane()
        made.rebalancer.planner._solve = solved_here
        return made

    async def packed(self, tasks: int = 9, quota: int = 12, **changes) -> None:
        """Have a job fill one machine of each MSB."""
        await self.set_up(quota)
        spec = {"fit": Fit.TIGHT, "limits": BIG, "update": UpdatePolicy(max_unavailable=1)}
        await self.cp.apply_job(a_job(tasks, **(spec | changes)))
        await self.stable()

    async def per_machine(self) -> list[int]:
        record = (await self.cp.get_job("web")).record
        return sorted(Counter(t.placement.machine for t in record.tasks if t.placement).values())

    async def moves(self, state: MoveState = MoveState.DONE) -> int:
        return sum(move.state is state for move in self.cp.rebalancer.history().moves)

    async def causes(self) -> Counter:
        events = (await self.cp.job_events("web")).events
        return Counter(event.cause for event in events)


BIG = Limits(memory_max_bytes=256 << 20)


def in_region(body, **settings):
    async def main() -> None:
        world = Rebalanced(**settings)
        async with asyncio.timeout(20_000), world.running():
            await body(world)
        assert world.region.broken_rules == []

    run(main())


def test_hot_machines_give_tasks_to_free_ones_within_the_budget() -> None:
    """RE1, RE2, RE5: each move is an operation of the job, with cause `rebalance`."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        before = await w.per_machine()
        assert max(before) == 3

        await w.until(lambda: at_most(w, 2), within_s=900)
        await w.stable()

        assert (await w.causes())[Cause.REBALANCE] == 3
        await asyncio.sleep(60)
        assert (await w.moves(), w.cp.rebalancer.status().failed) == (3, 0)

    in_region(body)


async def at_most(w: Rebalanced, tasks: int) -> bool:
    return max(await w.per_machine()) <= tasks


def test_in_the_modes_off_and_recommend_nothing_moves() -> None:
    for mode in (RebalanceMode.OFF, RebalanceMode.RECOMMEND):

        async def body(w: Rebalanced, mode: RebalanceMode = mode) -> None:
            await w.packed()
            before = await w.per_machine()
            await asyncio.sleep(300)

            assert await w.per_machine() == before
            status = w.cp.rebalancer.status()
            assert (status.plan is not None) == (mode is RebalanceMode.RECOMMEND)
            plan = await w.cp.rebalancer.plan()
            assert plan.moves
            assert (plan.hot_before, plan.hot_after) == (3, 0)

        in_region(body, mode=mode)


def test_a_paused_rebalancer_begins_nothing_also_after_a_restart() -> None:
    async def main() -> None:
        world = Rebalanced()
        async with asyncio.timeout(20_000):
            async with world.running() as w:
                await w.packed()
                await w.cp.rebalancer.pause(PauseWish(reason="a launch"), "ops")
                before = await w.per_machine()
            async with world.running() as w:
                await asyncio.sleep(300)
                assert await w.per_machine() == before
                assert w.cp.rebalancer.status().paused_why == "a launch"
                await w.cp.rebalancer.resume()
                await w.until(lambda: at_most(w, 2), within_s=900)

    run(main())


def test_nothing_begins_while_the_region_is_unwell() -> None:
    async def body(w: Rebalanced) -> None:
        w.cp.rebalancer._unwell = lambda: "much is lost"
        await w.packed()
        before = await w.per_machine()
        await asyncio.sleep(300)

        assert await w.per_machine() == before
        assert w.cp.rebalancer.status().holding == "much is lost"

    in_region(body)


def test_a_task_that_moved_rests() -> None:
    """A task moves at most once in `rest_s`, also over a restart of the control plane."""

    async def main() -> None:
        world = Rebalanced()
        async with asyncio.timeout(20_000):
            async with world.running() as w:
                await w.packed()
                await w.until(lambda: at_most(w, 2), within_s=900)
                await w.stable()
                (moved, *_) = [
                    m for m in w.cp.rebalancer.history().moves if m.state is MoveState.DONE
                ]
            async with world.running() as w:
                terms = w.cp.rebalancer.planner.terms("web")
                assert terms is not None
                assert not terms.movable(moved.task)
                assert any(terms.movable(index) for index in range(9))

    run(main())


def test_it_comes_to_rest() -> None:
    """No oscillation: once nothing is gained, nothing moves any more, for a week."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.until(lambda: at_most(w, 2), within_s=900)
        await asyncio.sleep(3_600)
        done = await w.moves()
        await asyncio.sleep(14_400)

        assert await w.moves() == done <= 6

    in_region(body, rest_s=600.0)


def test_a_machine_that_joins_receives_work() -> None:
    """Nomad's users wait for this since 2020; here without anybody asking."""

    async def body(w: Rebalanced) -> None:
        late = [name for name in w.region.machines if name not in ("m1", "m2", "m3")]
        joined = {name: w.region.machines.pop(name) for name in late}
        await w.packed(quota=3)
        assert await w.per_machine() == [3, 3, 3]
        await asyncio.sleep(200)
        assert await w.per_machine() == [3, 3, 3]

        w.region.machines.update(joined)
        for name in late:
            await w.cp.joined(joined[name].join())
        await w.cp.put_entitlement("front", EntitlementSpec(machines=12, host_profile="web"))
        await w.until(lambda: at_most(w, 2), within_s=1_200)

    in_region(body)


def test_jobs_with_neighbours_or_volumes_that_stay_are_left_alone() -> None:
    async def body(w: Rebalanced) -> None:
        await w.packed()
        planner = w.cp.rebalancer.planner
        assert planner.terms("web") is not None

        data = Volume(path="/data", kind=VolumeKind.PERSISTENT)
        await w.cp.apply_job(a_job(1, name="db", volumes={"data": data}))
        await w.cp.apply_job(a_job(1, name="shy", apart_from=[Neighbour(job="web")]))
        await w.stable("db")
        await w.stable("shy")

        assert [planner.terms(job) for job in ("db", "shy", "web", "nobody")] == [None] * 4

    in_region(body, mode=RebalanceMode.OFF)


def test_a_move_that_has_not_begun_is_taken_back() -> None:
    """Its machine takes no tasks, so it waits; then the scheduler withdraws it and logs that."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        record = (await w.cp.get_job("web")).record
        used = {task.placement.machine for task in record.tasks if task.placement}
        other = next(name for name in w.region.machines if name not in used)
        w.region.machines[other].power_off()
        await asyncio.sleep(60)
        desk = RebalanceDesk(w.cp._jobs, w.runtime)

        assert await desk.begin("web", 0, other, "to see")
        await asyncio.sleep(30)
        assert desk.waiting() == [("web", 0)]
        await desk.withdraw("web", 0)
        await w.until(lambda: not w.cp._jobs.get("web").tasks[0].operation)

        (event,) = [e for e in (await w.cp.job_events("web")).events if e.cause == "rebalance"]
        assert event.outcome == "withdrawn"
        assert (await w.cp.get_job("web")).record.tasks[0].placement == record.tasks[0].placement

    in_region(body, mode=RebalanceMode.OFF)


def test_moves_are_explained() -> None:
    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.until(lambda: w.moves(), within_s=900)
        move = w.cp.rebalancer.history().moves[0]
        lines = w.cp.rebalancer.explain(move.id).lines

        assert lines[0].startswith(f"Task web-{move.task} is to go from {move.from_machine}")
        with pytest.raises(NotFound):
            w.cp.rebalancer.explain("p99.1")

    in_region(body)
