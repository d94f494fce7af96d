"""Regions for the ReBalancer's solver: seeded, with skewed loads on machines of a few kinds."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

from control_plane.api.rebalancing import GoalChange, MoveView
from control_plane.rebalancer.core.model import (
    FLOAT,
    INT,
    BinRule,
    RegionModel,
    TaskColumns,
    TaskKind,
    Weights,
    packed,
    unpacked,
)

GIB = 1 << 30
_MICRO = 1_000_000
_SIZES = ((32.0, 192 * GIB, 10_000), (64.0, 384 * GIB, 25_000), (128.0, 768 * GIB, 25_000))


def a_model(
    seed: int,
    machines: int,
    tasks: int,
    *,
    pools: int = 1,
    tight: bool = False,
    fixed: float = 0.0,
    free: int = 0,
    pinned: bool = True,
    price_per_gib: float = 0.002,
    weights: Weights | None = None,
    busy: float = 1.0,
) -> RegionModel:
    """Return a region in which claims fit and loads are skewed: a quarter of the machines is full.

    `tight`: claims leave almost no capacity. `fixed`: share of the tasks that may not move.
    `pinned`: a quarter of the jobs keeps its tasks in their MSBs. `free`: machines without tasks
    that the pools may take. `busy`: what tasks use in addition to their usual load.
    """
    made = random.Random(seed)
    kinds = [
        TaskKind(
            micro_rru=0,
            micro_cpus=cores * _MICRO // 2,
            needs=(memory * GIB, 0, network, 0, ports),
            admission=admission,
        )
        for cores, memory, network, ports in (
            (1, 2, 50, 1),
            (2, 4, 100, 1),
            (4, 8, 0, 0),
            (6, 20, 200, 2),
        )
        for admission in (0, 0, 0, 1)
    ]
    all_machines = machines + free
    kind_of = [0 if tight else made.choice((0, 1, 1, 2)) for _ in range(all_machines)]
    msbs = max(2, min(24, machines // 8))
    admissions = [
        bytes([1] * all_machines),
        bytes(int(kind_of[m] > 0 or tight) for m in range(all_machines)),
    ]
    room_cpu = [int(_SIZES[k][0] * _MICRO) for k in kind_of]
    room = [[_SIZES[k][1], 0, _SIZES[k][2], 0, 10_000] for k in kind_of]
    pool_of = [m % pools for m in range(all_machines)]
    of_pool = [[m for m in range(machines) if pool_of[m] == p] for p in range(pools)]
    hot = [made.sample(members, max(1, len(members) // 4)) for members in of_pool]
    per_job = max(2, min(50, tasks // 20))
    jobs = range(-(-tasks // per_job))
    task_job, task_index, task_kind, where, loads, can = [], [], [], [], [], []
    per_msb: Counter[tuple[int, int]] = Counter()
    rules = [
        [
            [BinRule(0, True)],
            [BinRule(0, True), BinRule(-1, True, 3)],
            [],
            [BinRule(0, not pinned)],
        ][j % 4]
        for j in jobs
    ]
    numbers = count()
    for job in jobs:
        pool, kind = job % pools, made.randrange(len(kinds))
        for index in range(min(per_job, tasks - job * per_job)):
            needs, cpu = kinds[kind].needs, kinds[kind].micro_cpus
            for attempt in range(60):
                group = hot[pool] if attempt < 30 and made.random() < 0.6 else of_pool[pool]
                m = made.choice(group)
                if cpu > room_cpu[m] or not admissions[kinds[kind].admission][m]:
                    continue
                if any(n > r for n, r in zip(needs, room[m], strict=True)):
                    continue
                if 0 < rules[job][-1].at_most <= per_msb[job, m] if len(rules[job]) > 1 else False:
                    continue
                break
            else:
                continue
            next(numbers)
            room_cpu[m] -= cpu
            room[m] = [r - n for r, n in zip(room[m], needs, strict=True)]
            per_msb[job, m] += 1
            task_job.append(job)
            task_index.append(index)
            task_kind.append(kind)
            where.append(m)
            share = busy * made.choice((0.2, 0.5, 0.8, 1.0, 1.4))
            network = needs[2] * share
            loads.append((cpu / _MICRO * share, needs[0] * made.uniform(0.3, 1.0), network))
            can.append(made.random() >= fixed)
    return RegionModel(
        weights=weights or Weights(),
        pools=[f"pool{p}" for p in range(pools)],
        machines=[f"m{m:05}" for m in range(all_machines)],
        pool_of=pool_of,
        is_free=[m >= machines for m in range(all_machines)],
        is_open=[made.random() > 0.02 for _ in range(all_machines)],
        sizes=[(_SIZES[k][0], float(_SIZES[k][1]), float(_SIZES[k][2])) for k in kind_of],
        cpu_grains=[(1, 1)] * all_machines,
        room_cpu=room_cpu,
        room=[tuple(r) for r in room],  # type: ignore[misc]
        bins=[[m * msbs // all_machines for m in range(all_machines)]],
        admissions=admissions,
        jobs=[f"job{j}" for j in jobs],
        rules=rules,
        kinds=kinds,
        tasks=columns(
            list(zip(task_job, task_index, task_kind, where, strict=True)),
            loads,
            [kinds[k].needs[0] / GIB * price_per_gib for k in task_kind],
            can,
        ),
    )


def columns(
    tasks: list[tuple[int, int, int, int]],
    loads: list[tuple[float, float, float]],
    prices: list[float],
    can_move: list[bool],
) -> TaskColumns:
    """Return tasks as columns: job, index, kind and machine of each."""
    job, index, kind, machine = (packed(INT, [t[i] for t in tasks]) for i in range(4))
    return TaskColumns(
        job=job,
        index=index,
        kind=kind,
        machine=machine,
        load=packed(FLOAT, [number for load in loads for number in load]),
        price=packed(FLOAT, prices),
        can_move=bytes(can_move),
    )


class Replay:
    """Carries out steps one by one in plain Python, and reports the rules that they break.

    A task claims its new machine before it leaves its old one. This class shares no code with the
    solver.
    """

    def __init__(self, model: RegionModel) -> None:
        self.model = model
        self.room_cpu, self.room = list(model.room_cpu), [list(r) for r in model.room]
        tasks = model.tasks
        self.job, self.kind = unpacked(INT, tasks.job), unpacked(INT, tasks.kind)
        self.where, self.load = unpacked(INT, tasks.machine), unpacked(FLOAT, tasks.load)
        self.task_of = {
            (model.jobs[j], i): t
            for t, (j, i) in enumerate(zip(self.job, unpacked(INT, tasks.index), strict=True))
        }
        self.number = {name: m for m, name in enumerate(model.machines)}

    def carry_out(self, steps: list[MoveView]) -> list[str]:
        """Carry out steps in this order. Return the rules that they broke."""
        return [wrong for step in steps for wrong in self._one(step)]

    def _one(self, step: MoveView) -> list[str]:
        model, wrong = self.model, []
        task, to = self.task_of[step.job, step.task], self.number[step.to_machine]
        at, kind = self.where[task], model.kinds[self.kind[task]]
        if model.machines[at] != step.from_machine:
            wrong.append(f"{step}: the task is on {model.machines[at]}")
        if not model.tasks.can_move[task]:
            wrong.append(f"{step}: may not move")
        if not model.is_open[to] or not model.admissions[kind.admission][to]:
            wrong.append(f"{step}: may not run there")
        if model.pool_of[at] != model.pool_of[to]:
            wrong.append(f"{step}: another entitlement's machine")
        before = self.spread(self.job[task])
        self._charge(kind, to, 1)
        if self.room_cpu[to] < 0 or min(self.room[to]) < 0:
            wrong.append(f"{step}: no room")
        self._charge(kind, at, -1)
        self.where[task] = to
        for rule, was, now in zip(
            model.rules[self.job[task]], before, self.spread(self.job[task]), strict=True
        ):
            if not rule.even and was != now:
                wrong.append(f"{step}: left its bin")
            if max(now.values()) > max(was.values()) or len(now) < len(was):
                wrong.append(f"{step}: less even")
            if 0 < rule.at_most < max(now.values()) and max(now.values()) > max(was.values()):
                wrong.append(f"{step}: too many in one bin")
        return wrong

    def _charge(self, kind: TaskKind, machine: int, sign: int) -> None:
        per_rru, per_cpu = self.model.cpu_grains[machine]
        self.room_cpu[machine] -= sign * (kind.micro_rru * per_rru + kind.micro_cpus * per_cpu)
        for place, need in enumerate(kind.needs):
            self.room[machine][place] -= sign * need

    def spread(self, job: int) -> list[Counter[int]]:
        """Return for each rule of a job how many tasks each bin has."""
        model = self.model
        tasks = [t for t, j in enumerate(self.job) if j == job]
        return [
            Counter(
                self.where[t] if rule.property < 0 else model.bins[rule.property][self.where[t]]
                for t in tasks
            )
            for rule in model.rules[job]
        ]

    def cost(self) -> float:
        """Return the sum of the goals, as the documentation defines them."""
        model, weights = self.model, self.model.weights
        used = [[0.0, 0.0, 0.0] for _ in model.machines]
        for task, machine in enumerate(self.where):
            for d in range(3):
                used[machine][d] += self.load[3 * task + d]
        found = 0.0
        for pool in range(len(model.pools)):
            members = [m for m in range(len(model.machines)) if model.pool_of[m] == pool]
            for d in range(3):
                size = sum(model.sizes[m][d] for m in members if not model.is_free[m])
                level = sum(used[m][d] for m in members) / size + weights.tolerance
                for m in members:
                    share = used[m][d] / model.sizes[m][d]
                    found += weights.balance * max(0.0, share - level)
                    found += weights.hot * max(0.0, share - weights.hot_from)
        return found


def total(scores: list[GoalChange], *, after: bool) -> float:
    """Return the sum of the goals."""
    return sum(score.after if after else score.before for score in scores)
