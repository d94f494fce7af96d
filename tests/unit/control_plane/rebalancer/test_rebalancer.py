"""The ReBalancer in a region: it plans, moves tasks by operations of jobs, and can be paused."""

import asyncio
import time
from collections import Counter

import pytest
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region

from agent.api import Limits
from agent.api.volumes import Volume, VolumeKind
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import UpdatePolicy
from control_plane.api.operations import Cause
from control_plane.api.policy import Fit, Neighbour
from control_plane.api.rebalancing import MoveState, PauseRequest
from control_plane.api.settings import RebalanceMode, RebalanceSettings
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.core.solving import solve
from control_plane.rebalancer.core.survey import JobTerms
from control_plane.roles import ControlPlane
from control_plane.scheduler.rebalance_operations import RebalanceOperations
from wire.errors import NotFound


async def solved_here(model: RegionModel, effort: Effort) -> SolverAnswer:
    """Solve in this process, with a limit of steps instead of time."""
    return solve(model, Effort(steps=500, moves=effort.moves), time.monotonic)


class Rebalanced(World):
    """A region of twelve machines in which one job is packed on few machines."""

    def __init__(self, mode: RebalanceMode = RebalanceMode.APPLY, **changes) -> None:
        knobs = {"mode": mode, "every_s": 60.0, "settle_s": 0.0, "moves_per_s": 5.0}
        knobs |= {"hot_from": 0.6} | changes
        super().__init__(a_region(12), rebalance=RebalanceSettings(**knobs))

    def control_plane(self) -> ControlPlane:
        made = super().control_plane()
        made.rebalancer.planner._solve = solved_here
        return made

    async def packed(self, tasks: int = 9, quota: int = 12, **changes) -> None:
        """Run a job that fills one machine of each MSB."""
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


@pytest.mark.behaviour("RE1", "RE2", "RE5")
def test_hot_machines_give_tasks_to_free_ones_within_the_budget() -> None:
    """Each move is an operation of the job, with cause `rebalance`."""

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
                await w.cp.rebalancer.pause(PauseRequest(reason="a launch"), "ops")
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


def test_a_task_that_moved_is_not_moved_again_soon() -> None:
    """A task moves at most once in `rest_s`, also across a restart of the control plane."""

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


def test_moves_end_once_nothing_improves() -> None:
    """There is no oscillation: once no gain is left, nothing moves any more."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.until(lambda: at_most(w, 2), within_s=900)
        await asyncio.sleep(3_600)
        done = await w.moves()
        await asyncio.sleep(14_400)

        assert await w.moves() == done <= 6

    in_region(body, rest_s=600.0)


def test_a_machine_that_joins_receives_work() -> None:
    """Nomad's users have waited for this since 2020. The ReBalancer does it without a request."""

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
        await w.cp.capacity.put_entitlement(
            "front", EntitlementSpec(machines=12, host_profile="web")
        )
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

        assert [planner.terms(job) for job in ("db", "shy", "web", "unknown")] == [None] * 4

    in_region(body, mode=RebalanceMode.OFF)


def test_a_move_that_has_not_begun_is_taken_back() -> None:
    """The target machine takes no tasks, so the move waits. Then the scheduler withdraws it and
    logs that."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        record = (await w.cp.get_job("web")).record
        used = {task.placement.machine for task in record.tasks if task.placement}
        other = next(name for name in w.region.machines if name not in used)
        w.region.machines[other].power_off()
        await asyncio.sleep(60)
        operations = RebalanceOperations(w.cp._jobs, w.runtime)

        assert await operations.begin("web", 0, other, "to see")
        await asyncio.sleep(30)
        assert operations.waiting() == [("web", 0)]
        await operations.withdraw("web", 0)
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

        assert lines[0].startswith(f"Task web-{move.task} should move from {move.from_machine}")
        with pytest.raises(NotFound):
            w.cp.rebalancer.explain("p99.1")

    in_region(body)


@pytest.mark.behaviour("RE2")
def test_measured_loads_move_tasks_that_claim_alike() -> None:
    """Reported loads count instead of claims once two readings give a rate."""

    async def body(w: Rebalanced) -> None:
        await w.set_up(12)
        one_each = {"limits": BIG, "update": UpdatePolicy(max_unavailable=1)}
        await w.cp.apply_job(a_job(6, fit=Fit.TIGHT, **one_each))
        await w.stable()
        record = (await w.cp.get_job("web")).record
        hot = record.tasks[0].placement.machine
        busy = [t.index for t in record.tasks if t.placement.machine == hot]
        assert len(busy) > 1
        w.region.used = {f"web-{t.index}": (0.01, 1 << 20) for t in record.tasks}
        assert (await w.cp.rebalancer.plan()).moves == []
        w.region.used |= {f"web-{index}": (0.9, 1 << 20) for index in busy}

        await w.until(lambda: w.moves(), within_s=900)

        move = w.cp.rebalancer.history().moves[0]
        assert move.from_machine == hot
        assert move.why.startswith("cpu of")
        plan = await w.cp.rebalancer.plan()
        assert plan.measured == plan.tasks == 6
        assert plan.oldest_load_s is not None
        assert plan.oldest_load_s <= 3 * 30.0

    in_region(body, measure_s=30.0, smooth_s=60.0, hot_from=0.8, every_s=120.0)


@pytest.mark.behaviour("EX10")
def test_a_plan_shows_the_use_of_each_entitlement() -> None:
    """By dimension, relative to the machines that it holds. The use is measured if agents reported
    it."""

    async def body(w: Rebalanced) -> None:
        await w.packed(quota=3)
        machine = next(m for m in w.cp._allocator.index.machines.values() if m.jobs)
        rru, memory = machine.capacity.rru, machine.capacity.memory_bytes
        w.cp.rebalancer.watch.measured = lambda _job, tasks: [
            (rru / 10, memory / 5, 0.0) for _ in tasks
        ]

        plan = await w.cp.rebalancer.plan()

        assert plan.measured == 9
        held = len({m.pool for m in w.cp._allocator.index.machines.values() if m.jobs})
        assert held == 1
        assert plan.used["front"]["cpu"] == pytest.approx(9 * 0.1 / 3, abs=1e-3)
        assert plan.used["front"]["memory"] == pytest.approx(9 * 0.2 / 3, abs=1e-3)

    in_region(body, mode=RebalanceMode.OFF)


@pytest.mark.behaviour("RE2")
def test_loads_that_were_not_read_lately_do_not_count() -> None:
    """The plan shows the age of each load. Without recent loads, claims count again."""

    async def body(w: Rebalanced) -> None:
        await w.packed(3)
        w.region.used = {f"web-{index}": (0.5, 1 << 20) for index in range(3)}
        await asyncio.sleep(120)
        assert (await w.cp.rebalancer.plan()).measured == 3
        for machine in w.region.machines.values():
            machine.behaviour.answer_s = 1_000.0
        await asyncio.sleep(100)

        plan = await w.cp.rebalancer.plan()
        assert (plan.measured, plan.oldest_load_s) == (0, None)

    in_region(body, mode=RebalanceMode.RECOMMEND, measure_s=30.0)


@pytest.mark.behaviour("RE5", "RE7")
def test_a_restarted_control_plane_continues_its_plan() -> None:
    """If the plan is too old, its moves are reported as withdrawn."""

    async def main() -> None:
        world = Rebalanced(moves_per_s=0.001, moves_burst=1, every_s=2_000.0)
        async with asyncio.timeout(40_000):
            async with world.running() as w:
                await w.packed()
                await w.until(lambda: w.moves(), within_s=4_000)
                left = [m for m in w.cp.rebalancer.status().plan.moves if m.state == "planned"]
                assert left
            async with world.running() as w:
                await w.until(lambda: w.cp.rebalancer.status().plan)
                plan = w.cp.rebalancer.status().plan
                assert plan.resumed_at is not None
                states = {m.id: m.state for m in plan.moves}
                assert all(states[m.id] == "planned" for m in left)
                assert list(states.values()).count("done") == 1
            await asyncio.sleep(5_000)
            async with world.running() as w:
                await w.until(lambda: w.moves(MoveState.WITHDRAWN))
                reasons = [m.reason for m in w.cp.rebalancer.history().moves]
                assert "the control plane restarted, and the plan is too old" in reasons
                assert await w.moves(MoveState.WITHDRAWN) == len(left)

    run(main())


def test_a_lost_machine_has_its_entitlement_planned_again_before_the_next_plan_is_due() -> None:
    async def body(w: Rebalanced) -> None:
        await w.packed()
        plans = w.cp.rebalancer.records.state.plans
        await w.until(lambda: at_most(w, 2), within_s=4_000)
        assert w.cp.rebalancer.records.state.plans > plans
        assert w.cp.rebalancer.status().plan.only == ["front"]

    in_region(body, every_s=1_500.0)


@pytest.mark.behaviour("RE4", "SH1")
def test_all_shards_of_a_process_are_planned_together() -> None:
    """Each pool is planned as the shard that owns it knows it."""

    async def main() -> None:
        world = Rebalanced()
        world.settings = replace(world.settings, shards=3)
        async with asyncio.timeout(20_000), world.running() as w:
            for machine in w.region.machines.values():
                await w.cp.joined(machine.join())
            spec = {"fit": Fit.TIGHT, "limits": BIG, "update": UpdatePolicy(max_unavailable=1)}
            for pool in ("e0", "e1"):
                quota = EntitlementSpec(machines=6, host_profile="web")
                await w.cp.capacity.put_entitlement(pool, quota)
                await w.cp.apply_job(a_job(9, name=f"job-{pool}", entitlement=pool, **spec))
                await w.stable(f"job-{pool}")
            owners = {w.cp.shards.of_pool(pool).number for pool in ("e0", "e1")}
            assert len(owners) == 2

            def moved() -> bool:
                done = [m.job for m in w.cp.rebalancer.history().moves if m.state == "done"]
                return {"job-e0", "job-e1"} <= set(done)

            await w.until(moved, within_s=2_000)
            assert (await w.cp.rebalancer.plan()).tasks == 18

    run(main())


def test_plans_that_miss_much_in_a_row_are_an_alarm() -> None:
    async def body(w: Rebalanced) -> None:
        await w.packed()
        record = w.cp._jobs.get("web")
        assert record is not None
        w.cp.rebalancer.planner.terms = lambda *_: JobTerms((), lambda _: False)

        async def stuck(model: RegionModel, effort: Effort) -> SolverAnswer:
            return replace(await solved_here(model, effort), bound=0.0)

        w.cp.rebalancer.planner._solve = stuck
        assert w.cp.rebalancer.alarm() == ""
        await asyncio.sleep(60 * 5)

        assert w.cp.rebalancer.status().gap == 1.0
        assert w.cp.rebalancer.alarm().startswith("rebalancing: 3 plans in a row gain less")
        assert w.cp.rebalancer.alarm() in (await w.cp.ready()).detail

    in_region(body, every_s=60.0)
