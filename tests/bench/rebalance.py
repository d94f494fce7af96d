"""How well and how fast does the ReBalancer improve a skewed region, compared with other methods?

    python -m tests.bench.rebalance [--json] [--large] [--incremental]

`closed` is the gain of a plan as a share of the best possible gain (the bound). The same instance
is given to the rule of Kubernetes' descheduler (LowNodeUtilization) and to a repeated best-fit
packing of all tasks (rules of jobs left out), and a small one to HiGHS as a mixed-integer program.
Times are CPU times, not wall-clock times. `--large` adds a million tasks on 50,000 machines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import random
import resource
import time
from types import SimpleNamespace
from typing import Any, TextIO, cast

import highspy
import msgspec
import numpy as np
from msgspec.structs import replace

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.jobs import JobRecord, JobSpec, TaskPhase, TaskRecord
from control_plane.api.settings import RebalanceSettings
from control_plane.broker.core.capacity import Capacity, Place
from control_plane.rebalancer.__main__ import own_output
from control_plane.rebalancer.core.loads import Loads, TaskLoad
from control_plane.rebalancer.core.model import (
    Effort,
    RegionModel,
    SolverAnswer,
    Weights,
)
from control_plane.rebalancer.core.region_state import RegionState
from control_plane.rebalancer.core.solving import solve
from control_plane.rebalancer.load_watch import LoadWatch
from control_plane.rebalancer.planning import Planner
from control_plane.rebalancer.ports import ShardedPlaces
from control_plane.runtime.runtime import Runtime
from tests.rebalancer_models import a_model, total

Figures = dict[str, Any]
CHEAP = Weights(move=0.001, move_per_gib=0.0, open=0.01)
"""Moves cost almost nothing, because the bound assumes that they cost nothing."""


def instance(machines: int, tasks: int, pools: int = 1) -> RegionModel:
    """Return a skewed region in which no memory has to be warmed up."""
    return a_model(1, machines, tasks, pools=pools, pinned=False, weights=CHEAP, price_per_gib=0.0)


def ours(model: RegionModel, seconds: float) -> tuple[SolverAnswer, float]:
    """Return the answer, and its CPU seconds."""
    began = time.process_time()
    answer = solve(model, Effort(seconds=seconds, moves=10**9), time.process_time)
    return answer, time.process_time() - began


def figures_of(answer: SolverAnswer, took_s: float) -> Figures:
    """Return the figures of one answer."""
    before, after = total(answer.scores, after=False), total(answer.scores, after=True)
    bound = answer.bound or 0.0
    return {
        "tasks_moved": len(answer.moves),
        "closed": round((before - after) / max(before - bound, 1e-9), 4),
        "before": round(before, 2),
        "after": round(after, 3),
        "bound": round(bound, 3),
        "hot_before": answer.hot_before,
        "hot_after": answer.hot_after,
        "cpu_s": round(took_s, 2),
    }


def descheduled(model: RegionModel, bound: float) -> Figures:
    """Return the result of LowNodeUtilization: it moves pods from nodes above 50 % to those below
    20 %.

    Its defaults fit no region that is half full. Here a node is over-utilised above the average
    plus 10 %, and under-utilised below the average (`useDeviationThresholds`). Each evicted task
    moves to the machine with the least use, as the scheduler's LeastAllocated does.
    """
    began, state = time.process_time(), RegionState(model)
    before = float(state.cost.sum())
    hot, moved = state.count_hot(), 0
    average = state.pool_limits[0] - model.weights.tolerance
    known = average > 0
    shares = state.used * state.per_size
    for machine in np.argsort(-shares.max(axis=1)):
        for task in sorted(state.tasks_on[machine], key=lambda t: float(state.load[t].max())):
            share = state.used[machine] * state.per_size[machine]
            if not (share > average + 0.1).any():
                break
            below = (state.used * state.per_size < average)[:, known]
            under = np.nonzero(below.all(axis=1))[0]
            if not len(under):
                break
            ok = state.fits(state.kind[task : task + 1], under)[0]
            places = under[ok]
            places = places[np.argsort((state.used[places] * state.per_size[places]).sum(axis=1))]
            to = next((int(m) for m in places if state.keeps_rules(task, int(m))), None)
            if to is not None:
                state.move(task, to)
                moved += 1
    after = sum(state.goals().values())
    return {
        "tasks_moved": moved,
        "closed": round((before - after) / max(before - bound, 1e-9), 4),
        "hot_before": hot,
        "hot_after": state.count_hot(),
        "cpu_s": round(time.process_time() - began, 2),
    }


def repacked(model: RegionModel, bound: float) -> Figures:
    """Return the result of packing all tasks again: the largest first, each where it fits best.

    It packs loads up to the level of the goals. If nothing fits below that, it packs by claims
    alone.
    """
    began, state = time.process_time(), RegionState(model)
    before, hot, start = float(state.cost.sum()), state.count_hot(), state.where.copy()
    claims = [(task, int(machine)) for task, machine in enumerate(start)]
    for task, machine in claims:
        state._charge(task, machine, -1)
    state.tasks_on = [[] for _ in model.machines]
    limits = state.limits / np.maximum(state.per_size, 1e-12)
    every, placed = np.arange(len(model.machines)), 0
    shares = (state.load * state.per_size[start]).max(axis=1)
    for task in np.argsort(-shares).tolist():
        fitting = every[state.fits(state.kind[task : task + 1], every)[0]]
        left = (limits[fitting] - state.used[fitting] - state.load[task]) * state.per_size[fitting]
        below = left.min(axis=1)
        best = np.where(below >= 0, below, np.inf) if (below >= 0).any() else -below
        to = int(fitting[best.argmin()]) if len(fitting) else int(start[task])
        state._charge(task, to, 1)
        state.where[task] = to
        placed += to != start[task]
    state.cost = state.costs(every, state.used)
    return {
        "tasks_moved": int(placed),
        "closed": round((before - float(state.cost.sum())) / max(before - bound, 1e-9), 4),
        "hot_before": hot,
        "hot_after": state.count_hot(),
        "cpu_s": round(time.process_time() - began, 2),
    }


def with_highs(model: RegionModel, seconds: float) -> tuple[float, float]:
    """Return the best sum of goals and prices that HiGHS finds alone, and its bound.

    There is one binary variable per task and machine. Rules about evenness are left out, so its
    optimum is at least as good as that of the whole problem.
    """
    state = RegionState(model)
    machines, tasks = len(model.machines), len(state.where)
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("time_limit", seconds)
    every = np.arange(machines)
    room_cpu, room = state.room_cpu.copy(), state.room.copy()
    for task in range(tasks):
        state._charge(task, int(state.where[task]), -1)
    fits = state.fits(state.kind, every)
    put = {
        (t, m): solver.addBinary()
        for t in range(tasks)
        for m in range(machines)
        if fits[t, m] or m == state.where[t]
    }
    for t in range(tasks):
        solver.addConstr(sum(put[t, m] for m in range(machines) if (t, m) in put) == 1)
    costs = [state.price[t] * v for (t, m), v in put.items() if m != state.where[t]]
    cpu = state.kind_cpu[state.kind] @ np.array([1, 1])
    for m in range(machines):
        here = [(t, put[t, m]) for t in range(tasks) if (t, m) in put]
        solver.addConstr(
            sum(float(cpu[t]) / 1e6 * v for t, v in here) <= float(state.room_cpu[m]) / 1e6
        )
        memory = state.kind_needs[state.kind, 0] / 2**30
        solver.addConstr(
            sum(float(memory[t]) * v for t, v in here) <= float(state.room[m, 0]) / 2**30
        )
        for d in range(3):
            share = sum(float(state.load[t, d] * state.per_size[m, d]) * v for t, v in here)
            for above, weight in (
                (float(state.limits[m, d]), model.weights.balance),
                (model.weights.hot_from, model.weights.hot),
            ):
                over = solver.addVariable(lb=0)
                solver.addConstr(over >= share - above)
                costs.append(weight * over)
    state.room_cpu[:], state.room[:] = room_cpu, room
    solver.minimize(sum(costs))
    info = solver.getInfo()
    return float(info.objective_function_value), float(info.mip_dual_bound)


def against_highs(machines: int, tasks: int, seconds: float) -> Figures:
    """Return sums of goals and prices on one small instance: ours, HiGHS's, and its bound."""
    model = a_model(1, machines, tasks, pinned=False)
    answer, took_s = ours(model, seconds)
    best, bound = with_highs(model, seconds)
    here = total(answer.scores, after=True) + answer.price
    start = total(answer.scores, after=False)
    return {
        "before": round(start, 3),
        "ours": round(here, 3),
        "ours_cpu_s": round(took_s, 2),
        "highs": round(best, 3),
        "highs_bound": round(bound, 3),
        "highs_limit_s": seconds,
        "closed_of_bound": round((start - here) / max(start - bound, 1e-9), 4),
    }


def carried_out(model: RegionModel, answer: SolverAnswer) -> RegionModel:
    """Return the region after a plan."""
    state = RegionState(model)
    number = {name: m for m, name in enumerate(model.machines)}
    tasks = zip(state.job.tolist(), state.index.tolist(), strict=True)
    task_of = {(model.jobs[job], index): t for t, (job, index) in enumerate(tasks)}
    for step in answer.moves:
        state.move(task_of[step.job, step.task], number[step.to_machine])
    return as_it_is(state)


def as_it_is(state: RegionState) -> RegionModel:
    """Return the model of a region with its tasks at the places of this state."""
    where = state.where.astype(np.int32).tobytes()
    return replace(
        state.model,
        room_cpu=state.room_cpu.tolist(),
        room=[tuple(room) for room in state.room.tolist()],
        is_open=state.is_open.tolist(),
        tasks=replace(state.model.tasks, machine=where),
    )


def after_a_loss(model: RegionModel) -> Figures:
    """Return how long a plan takes after the loss of one machine, and how much it gains.

    Its tasks went to the machines of its entitlement that have the most room for them. The plan is
    for all machines: the ReBalancer plans first for the entitlement that lost the machine.
    """
    state, lost = RegionState(model), int(np.argmax(RegionState(model).used[:, 0]))
    state.is_open[lost] = False
    state.admits[:, lost] = False
    mates = np.nonzero(state.pool == state.pool[lost])[0]
    for task in list(state.tasks_on[lost]):
        ok = state.fits(state.kind[task : task + 1], mates)[0]
        shares = np.where(ok, (state.used[mates] * state.per_size[mates]).max(axis=1), np.inf)
        state.move(task, int(mates[shares.argmin()]))
    answer, took_s = ours(as_it_is(state), 60.0)
    return figures_of(answer, took_s)


def an_index(machines: int, pools: int, tasks: int) -> RegionIndex:
    """Return the index of a region of equal tasks at random places."""
    offered = Capacity("a", 64.0, 64.0, 384 << 30, network_mbps=25_000)
    index, chance = RegionIndex(), random.Random(1)
    index.put_many(
        (
            *(f"m{n:05}", offered),
            *(
                Place("r", f"d{n % 4}", f"b{n % 12}", f"w{n % 48}", f"k{n % 480}"),
                f"p{n % pools}",
                "",
            ),
        )
        for n in range(machines)
    )
    demand = Demand(memory_bytes=4 << 30, cpus=1.0, network_mbps=50)
    for pool in range(pools):
        mine = list(index.pools[f"p{pool}"].machines())
        for job in range(tasks // pools // 50):
            placed = [chance.choice(mine) for _ in range(50)]
            index.restore_equal(f"p{pool}-{job:05}", f"p{pool}", 0, placed, demand)
    return index


class AsTheyAre:
    """The places of one shard, all of whose pools have their quotas."""

    def __init__(self, index: RegionIndex) -> None:
        self.index = index

    def entitlement_of(self, _spec: JobSpec) -> None:
        """Return no entitlement, so that the defaults apply."""


def a_planner(index: RegionIndex) -> tuple[Planner, list[float]]:
    """Return the product's planner for a region in which every task is idle and measured.

    Jobs share the records of their tasks, to save memory of the host. The list has the CPU seconds
    of the solver's process, including reading the model and writing the answer.
    """
    chance, solver_s = random.Random(2), list[float]()
    spec = JobSpec(name="j", entitlement="p", image="sha256:" + "0" * 64, command=["x"], tasks=50)
    tasks = [
        TaskRecord(index=n, version=1, generation=1, phase=TaskPhase.RUNNING, listed=True)
        for n in range(50)
    ]
    jobs = {name: JobRecord(name=name, spec=spec, version=1, tasks=tasks) for name in index.claims}
    loads = Loads(600.0)
    for name in jobs:
        loads.tasks[name] = {n: TaskLoad(chance.random() * 3, 2e9, 20.0, 0.0) for n in range(50)}

    async def solved(model: RegionModel, effort: Effort) -> SolverAnswer:
        encoded, began = msgspec.msgpack.encode(model), time.process_time()
        known = msgspec.msgpack.decode(encoded, type=RegionModel)
        answer = msgspec.msgpack.encode(solve(known, effort, time.process_time))
        solver_s.append(time.process_time() - began)
        return msgspec.msgpack.decode(answer, type=SolverAnswer)

    settings = SimpleNamespace(rebalance=RebalanceSettings(solve_s=60.0, free_machines=0))
    clock = SimpleNamespace(now=lambda: 0.0)
    measured = cast(Any, SimpleNamespace(settings=settings, runtime=clock))
    watch = LoadWatch(measured, cast(Any, None), cast(Any, None))
    watch.loads = loads
    table = SimpleNamespace(find=jobs.get, values=jobs.values)
    places = ShardedPlaces([cast(Any, AsTheyAre(index))])
    machines = SimpleNamespace(table=SimpleNamespace(find=lambda _: None))
    region = SimpleNamespace(settings=settings, runtime=Runtime(), broker=machines)
    of = cast(Any, region), cast(Any, table), places, solved
    return Planner(*of, watch, lambda _: {}), solver_s


def planned(planner: Planner, solver_s: list[float], only: set[str] | None) -> Figures:
    """Return how long it takes to plan for a region, or only for the entitlements in `only`."""
    began = time.process_time()
    plan = asyncio.run(planner.plan(1, only))
    took_s = time.process_time() - began
    return {
        "machines": plan.machines,
        "tasks": plan.tasks,
        "measured": plan.measured,
        "tasks_moved": len(plan.moves),
        "cpu_s": round(took_s, 2),
        "of_it_solver_s": round(solver_s[-1], 2),
    }


def incremental() -> Figures:
    """Return how long plans for an entitlement take after it lost or got a machine."""
    figures: Figures = {}
    for pools, only in ((20, {"p3"}), (20, None), (1, {"p0"})):
        index = an_index(50_000, pools, 1_000_000)
        planner = a_planner(index)
        gc.freeze()  # as the control plane does with objects that stay
        name = f"{len(only) if only else 'all'}_of_{pools}_entitlements"
        figures[name] = planned(*planner, only)
    return figures


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--large", action="store_true", help="A million tasks, besides.")
    parser.add_argument(
        "--incremental", action="store_true", help="Plans after one machine's loss."
    )
    options = parser.parse_args()
    with io.TextIOWrapper(own_output()) as output:
        report(options, output)


def report(options: argparse.Namespace, output: TextIO) -> None:
    """Write the requested figures."""
    if options.incremental:
        print(json.dumps(incremental()), file=output)
        return
    figures: Figures = {"beside_highs": against_highs(20, 200, 60.0)}
    full = a_model(1, 500, 10_000, pinned=False, weights=CHEAP, price_per_gib=0.0, busy=2.6)
    answer, took_s = ours(full, 60.0)
    figures["tasks_10000_full"] = figures_of(answer, took_s)
    for machines, tasks in ((500, 10_000), (5_000, 100_000)):
        model = instance(machines, tasks)
        answer, took_s = ours(model, 60.0)
        figures[f"tasks_{tasks}"] = figures_of(answer, took_s)
        if machines == 500:
            figures["descheduler_10000"] = descheduled(model, answer.bound or 0.0)
            figures["best_fit_10000"] = repacked(model, answer.bound or 0.0)
    small, large = figures["tasks_10000"]["cpu_s"], figures["tasks_100000"]["cpu_s"]
    figures["growth_10_times_tasks"] = round(large / max(small, 0.01), 1)
    if options.large:
        model = instance(50_000, 1_000_000, pools=20)
        answer, took_s = ours(model, 60.0)
        figures["tasks_1000000"] = figures_of(answer, took_s)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures["tasks_1000000"]["peak_mib"] = peak // 1024
        figures["one_lost_of_50000"] = after_a_loss(carried_out(model, answer))
        figures |= incremental()
    if options.json:
        print(json.dumps(figures), file=output)
    else:
        for name, value in figures.items():
            print(f"{name:24} {value}", file=output)


if __name__ == "__main__":
    main()
