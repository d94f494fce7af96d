"""Faults of the ReBalancer and wrong inputs to it do not stop the region."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_agents import IMAGE_2
from msgspec.structs import replace
from test_rebalancer import BIG, Rebalanced, at_most, in_region, solved_here
from virtual_time import run
from world import a_job

from control_plane.api.jobs import UpdatePolicy
from control_plane.api.policy import Fit
from control_plane.api.rebalancing import (
    MoveState,
    MoveView,
    PauseRequest,
    RebalancePlan,
    RebalanceRecord,
    SwapView,
)
from control_plane.rebalancer import solver
from control_plane.rebalancer.core.machine_use import Load
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.records import KEPT, RebalanceRecords
from control_plane.roles import ControlPlane
from control_plane.runtime.table import Table
from control_plane.store import Delete
from control_plane.store.memory import MemoryStore
from control_plane.store.records import REBALANCE
from wire.errors import Busy

pytestmark = pytest.mark.behaviour("RE7")

Solving = Callable[[RegionModel, Effort], Awaitable[SolverAnswer]]


async def works(w: Rebalanced) -> None:
    """Place, grow, release and shrink a job, as if there were no ReBalancer."""
    spec = {"fit": Fit.TIGHT, "limits": BIG, "update": UpdatePolicy(max_unavailable=2)}
    for tasks, image in ((4, None), (9, None), (9, IMAGE_2), (5, IMAGE_2)):
        more = {"image": image} if image else {}
        await w.cp.apply_job(a_job(tasks, **spec, **more))
        await w.stable()
        record = (await w.cp.get_job("web")).record
        assert sum(task.placement is not None for task in record.tasks) == tasks


async def dies(_model: RegionModel, _effort: Effort) -> SolverAnswer:
    raise MemoryError("the solver is dead")


async def hangs(_model: RegionModel, _effort: Effort) -> SolverAnswer:
    await asyncio.sleep(1e9)
    raise AssertionError


async def invents(model: RegionModel, effort: Effort) -> SolverAnswer:
    """Answer a real plan with added moves: of unknown tasks, to unknown machines, and to the same
    machine."""
    answer = await solved_here(model, effort)
    ghost = MoveView(
        id="",
        job="web",
        task=0,
        from_machine="m1",
        to_machine="m1",
        wave=0,
        gain=1.0,
        price=0.0,
        why="",
    )
    return replace(
        answer,
        moves=[
            ghost,
            replace(ghost, task=99),
            replace(ghost, job="ghost"),
            replace(ghost, to_machine="ghost"),
            replace(ghost, task=1, from_machine="ghost"),
            *answer.moves,
        ],
    )


@pytest.mark.behaviour("RE7")
@pytest.mark.parametrize("solving", [dies, hangs, invents])
def test_jobs_are_placed_whatever_the_solver_does(solving: Solving) -> None:
    """The solver dies, never answers, or answers with unknown tasks and machines."""

    class Broken(Rebalanced):
        def control_plane(self) -> ControlPlane:
            made = super().control_plane()
            made.rebalancer.planner._solve = solving
            return made

    async def main() -> None:
        world = Broken()
        async with asyncio.timeout(20_000), world.running() as w:
            await w.set_up(12)
            await works(w)
            await asyncio.sleep(600)
            await works(w)
        assert world.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP161")
def test_a_solver_that_cannot_be_started_is_reported_as_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the plan fails with its reason, and the loop of the ReBalancer continues."""

    async def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)

    with pytest.raises(Busy, match=r"cannot start the solver: .*temporarily unavailable"):
        run(solver.solved_file(Path("model.toml"), 1.0))


@pytest.mark.behaviour("RE7")
def test_jobs_are_placed_while_the_rebalancer_is_dead() -> None:
    """Its loop ends with an error after each start. The other loops are not affected."""
    begun: list[int] = []

    class Dead(Rebalanced):
        def control_plane(self) -> ControlPlane:
            made = super().control_plane()

            async def dead() -> None:
                begun.append(1)
                raise RuntimeError("dead")

            made.rebalancer.run = dead  # type: ignore[method-assign]
            return made

    async def main() -> None:
        world = Dead()
        async with asyncio.timeout(20_000), world.running() as w:
            await w.set_up(12)
            await works(w)
        assert world.region.broken_rules == []

    run(main())
    assert len(begun) > 1


LIES: dict[str, Load] = {
    "no number": (nan, nan, nan),
    "infinite": (inf, inf, inf),
    "negative": (-5.0, -1e12, -3.0),
    "a million times as much": (1e6, 1e15, 1e9),
}


@pytest.mark.behaviour("RE7", "RE2")
@pytest.mark.parametrize("lie", LIES)
def test_loads_that_are_wrong_break_no_rule_and_move_no_task_twice(lie: str) -> None:
    """Half of the tasks have impossible loads."""

    async def body(w: Rebalanced) -> None:
        watch = w.cp.rebalancer.watch
        watch.measured = lambda _job, tasks: [LIES[lie] if task % 2 else None for task in tasks]
        await w.packed()
        await asyncio.sleep(1_800)
        await w.stable()
        done = [m for m in w.cp.rebalancer.history().moves if m.state is MoveState.DONE]
        assert max(Counter(m.task for m in done).values(), default=0) <= 1
        assert len(await w.per_machine()) > 0

    in_region(body)


@pytest.mark.behaviour("RE5")
def test_a_job_that_is_released_is_left_alone_until_it_is_at_rest() -> None:
    """The ReBalancer plans nothing for it, although its machines are hot."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.cp.rebalancer.pause(request(), "ops")
        assert (await w.cp.rebalancer.plan()).moves
        spec = {"fit": Fit.TIGHT, "limits": BIG, "update": UpdatePolicy(max_unavailable=1)}
        await w.cp.apply_job(a_job(9, image=IMAGE_2, **spec))
        assert w.cp.rebalancer.planner.terms("web") is None
        assert (await w.cp.rebalancer.plan()).moves == []
        await w.stable()
        assert w.cp.rebalancer.planner.terms("web") is not None

    in_region(body)


@pytest.mark.behaviour("RE5", "RE7")
def test_nothing_is_moved_while_many_machines_are_down() -> None:
    """The brake for the region's losses holds the ReBalancer, and releases it later."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.cp.rebalancer.pause(request(), "ops")
        record = (await w.cp.get_job("web")).record
        used = {task.placement.machine for task in record.tasks if task.placement}
        lost = [name for name in w.region.machines if name not in used][:6]
        for name in lost:
            w.region.machines[name].power_off()
        await w.cp.rebalancer.resume()
        await w.until(lambda: w.cp.rebalancer.status().holding, within_s=300)
        assert "silent together" in w.cp.rebalancer.status().holding
        before = begun(w)
        await asyncio.sleep(120)
        assert "silent together" in w.cp.rebalancer.status().holding
        assert begun(w) <= before  # moves that have begun continue

        for name in lost:
            w.region.machines[name].power_on()
        await w.until(lambda: at_most(w, 2), within_s=1_800)

    in_region(body)


def begun(w: Rebalanced) -> set[str]:
    """Return the moves of the plan that were begun and not withdrawn."""
    plan = w.cp.rebalancer.status().plan
    assert plan is not None
    assert plan.moves
    idle = (MoveState.PLANNED, MoveState.WITHDRAWN)
    return {move.id for move in plan.moves if move.state not in idle}


def request() -> PauseRequest:
    return PauseRequest(reason="to look first")


@pytest.mark.behaviour("BUG-CP80")
def test_a_pause_is_kept_although_a_move_ends_at_the_same_moment() -> None:
    """Formerly each wrote the state that it had read before the other's write."""

    async def body(w: Rebalanced) -> None:
        await w.packed()
        await w.until(lambda: w.moves(), within_s=900)
        rebalancer, txn = w.cp.rebalancer, w.store.txn
        before = rebalancer.history().moves

        async def slowly(*given: Any) -> Any:
            await asyncio.sleep(1)
            return await txn(*given)

        w.store.txn = slowly  # type: ignore[method-assign]
        move = replace(before[0], id="p9.9")
        await asyncio.gather(
            rebalancer.pause(PauseRequest(reason="look"), "ann"), rebalancer._save_move(move)
        )
        assert rebalancer.status().paused
        assert rebalancer.history().moves[0].id == "p9.9"

    in_region(body)


@pytest.mark.behaviour("BUG-CP81")
def test_a_move_that_ended_while_the_process_was_away_is_recorded() -> None:
    """Formerly the moved task did not rest, and the move was missing from the history."""

    async def main() -> None:
        world = Rebalanced(every_s=2_000.0)
        async with asyncio.timeout(40_000):
            async with world.running() as w:
                await w.packed()
                ended, stuck = w.cp.rebalancer._save_move, list[MoveView]()

                async def stops(move: MoveView) -> None:
                    if move.state is MoveState.DONE:
                        stuck.append(move)
                        await asyncio.sleep(1e9)  # the process ends before this is stored
                    await ended(move)

                w.cp.rebalancer._save_move = stops  # type: ignore[method-assign]
                await w.until(lambda: stuck, 4_000)
            async with world.running() as w:
                rebalancer = w.cp.rebalancer

                def recorded() -> list[MoveState]:
                    return [m.state for m in rebalancer.history().moves if m.id == stuck[0].id]

                await w.until(recorded)
                assert recorded() == [MoveState.DONE]
                assert w.cp.rebalancer.records.moved_at("web")[stuck[0].task] > 0

    run(main())


@pytest.mark.behaviour("BUG-CP99")
async def test_a_plan_of_the_longest_kept_length_is_stored_on_every_engine() -> None:
    """On etcd the plan was refused, which ended the ReBalancer's loop after each plan."""
    source, target = (f"dc1-msb2-row3-rack12-host{n}.example.org" for n in (34, 35))
    moves = [
        MoveView(
            id=f"p1000.{number}",
            job="checkout-service-frontend",
            task=number,
            from_machine=source,
            to_machine=target,
            gain=0.1 + number / 9_999,
            price=0.0123,
            why=f"network of {source}: 92% -> {number % 80}%",
            at=1_764_430_000.123456 + number,
        )
        for number in range(KEPT)
    ]
    none = dict.fromkeys((f.name for f in msgspec.structs.fields(RebalancePlan) if f.required), 0)
    empty = none | {"goals": [], "moves": [], "is_complete": True}
    plan = replace(msgspec.convert(empty, RebalancePlan), moves=moves)
    record = RebalanceRecord(plan=plan)
    async with MemoryStore(strict=True) as store:
        for _ in range(2):
            table = Table(store, REBALANCE, RebalanceRecord, "rebalance record")
            await table.load()
            async with table.lock("plan"):
                await table.commit("plan", record)
            assert table.get("plan") == record


@pytest.mark.behaviour("BUG-CP136")
async def test_no_number_of_a_plan_comes_again_when_the_state_is_damaged() -> None:
    """Without moves the plan itself is not stored, and after it ended neither."""
    async with MemoryStore() as store:
        records = RebalanceRecords(store)
        await records.load()
        await records.change(lambda state: replace(state, plans=7))
        await records.put_plan(None)
        await store.txn({}, [Delete(f"{REBALANCE}state")])

        again = RebalanceRecords(store)
        await again.load()

        assert again.state.plans == 7


@pytest.mark.behaviour("BUG-CP136")
@pytest.mark.parametrize("stored", [{"swaps": [SwapView(id="s5.1", one="m1", two="m2")]}, {}])
async def test_plans_of_an_earlier_release_keep_their_numbers(stored: dict[str, Any]) -> None:
    """Its records do not have the number of plans in addition to the state."""
    async with MemoryStore() as store:
        table = Table(store, REBALANCE, RebalanceRecord, "rebalance record")
        await table.load()
        async with table.lock("swaps"):
            await table.commit("swaps", RebalanceRecord(**stored))
        records = RebalanceRecords(store)
        await records.load()

        assert records.state.plans == (5 if stored else 0)
