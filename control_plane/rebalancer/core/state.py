"""The model on numpy: where tasks are, what is left on machines, and what that costs.

One `State` is changed by moves and knows the cost of each machine at every moment. Rooms are exact
integers, as in the allocator; only loads are floating-point.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from control_plane.rebalancer.core.model import DIMENSIONS, BinRule, RegionModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class State:
    """Tasks on machines, and what that costs."""

    def __init__(self, model: RegionModel) -> None:
        """Take over where tasks are; rooms are what is left besides them."""
        machines, wide, columns = len(model.machines), len(DIMENSIONS), model.tasks
        self.model, weights = model, model.weights
        self.pool = np.array(model.pool_of, np.int64)
        self.sizes: Floats = np.array(model.sizes, np.float64).reshape(machines, wide)
        self.is_free = np.array(model.is_free, np.bool_)
        self.is_open = np.array(model.is_open, np.bool_)
        self.grains: Ints = np.array(model.cpu_grains, np.int64).reshape(machines, 2)
        self.room_cpu = np.array(model.room_cpu, np.int64)
        self.room: Ints = np.array(model.room, np.int64).reshape(machines, 5)
        self.where = np.frombuffer(columns.machine, np.int32).astype(np.int64)
        self.load: Floats = np.frombuffer(columns.load, np.float64).reshape(-1, wide)
        self.can_move = np.frombuffer(columns.can_move, np.bool_)
        self.price = weights.move + np.frombuffer(columns.price, np.float64)
        self.kind = np.frombuffer(columns.kind, np.int32).astype(np.int64)
        self.index = np.frombuffer(columns.index, np.int32)
        self.job = np.frombuffer(columns.job, np.int32).astype(np.int64)
        self.kind_cpu: Ints = np.array(
            [(k.micro_rru, k.micro_cpus) for k in model.kinds], np.int64
        ).reshape(-1, 2)
        self.kind_needs: Ints = np.array([k.needs for k in model.kinds], np.int64).reshape(-1, 5)
        self.admission = np.array([k.admission for k in model.kinds], np.int64)
        self.admits: Flags = (
            np.array(
                [np.frombuffer(each, np.uint8) for each in model.admissions], np.bool_
            ).reshape(len(model.admissions), machines)
            & self.is_open
        )
        self.bins: Ints = np.array(model.bins, np.int64).reshape(len(model.bins), machines)
        with np.errstate(divide="ignore"):
            self.per_size: Floats = np.where(self.sizes > 0, 1.0 / self.sizes, 0.0)
        self.used = np.zeros((machines, wide))
        np.add.at(self.used, self.where, self.load)
        self.level = self._levels(len(model.pools)) + weights.tolerance
        self.limit = self.level[self.pool]
        """By machine: what is above costs."""
        self.on: list[list[int]] = [[] for _ in range(machines)]
        where = self.where.tolist()
        for task, machine in enumerate(where):
            self.on[machine].append(task)
        self.counts: Counter[tuple[int, int, int]] = Counter()
        """Job, number of its rule, bin → its tasks there."""
        for job, machine in zip(self.job.tolist(), where, strict=True):
            for number, rule in enumerate(model.rules[job]):
                self.counts[job, number, self.bin(rule, machine)] += 1
        self.cost = self.costs(np.arange(machines), self.used)

    def _levels(self, pools: int) -> Floats:
        """Return by pool and dimension how much of its own machines is used."""
        used, sizes = np.zeros((pools, len(DIMENSIONS))), np.zeros((pools, len(DIMENSIONS)))
        own = ~self.is_free
        np.add.at(used, self.pool, np.where(self.sizes > 0, self.used, 0.0))
        np.add.at(sizes, self.pool[own], self.sizes[own])
        return np.asarray(used / np.maximum(sizes, 1e-12))

    def costs(self, machines: Ints, used: Floats) -> Floats:
        """Return what each machine costs while so much of it is used; the last axis is reduced."""
        return np.asarray(self.parts(machines, used).sum(axis=-1))

    def parts(self, machines: Ints, used: Floats) -> Floats:
        """Return the same by dimension."""
        weights = self.model.weights
        shares = used * self.per_size[machines]
        over = np.maximum(shares - self.limit[machines], 0.0)
        hot = np.maximum(shares - weights.hot_from, 0.0)
        return np.asarray(weights.balance * over + weights.hot * hot)

    def goals(self) -> dict[str, float]:
        """Return what each goal is now, counted again from where the tasks are."""
        weights, used = self.model.weights, np.zeros_like(self.used)
        np.add.at(used, self.where, self.load)
        shares = used * self.per_size
        over = weights.balance * np.maximum(shares - self.limit, 0.0).sum(axis=0)
        hot = weights.hot * np.maximum(shares - weights.hot_from, 0.0).sum(axis=0)
        found = {f"balance of {name}": float(over[at]) for at, name in enumerate(DIMENSIONS)}
        found |= {f"hot in {name}": float(hot[at]) for at, name in enumerate(DIMENSIONS)}
        return found

    def hot(self) -> int:
        """Return how many machines are hot in some dimension."""
        shares = self.used * self.per_size
        return int((shares > self.model.weights.hot_from + 1e-9).any(axis=1).sum())

    # -- what is allowed

    def fits(self, kinds: Ints, machines: Ints) -> Flags:
        """Return for each kind (rows) and machine (columns) whether there is room."""
        rru, cpus = self.kind_cpu[kinds, 0], self.kind_cpu[kinds, 1]
        grains = self.grains[machines]
        cpu = rru[:, None] * grains[:, 0] + cpus[:, None] * grains[:, 1]
        ok = cpu <= self.room_cpu[machines]
        ok &= (self.kind_needs[kinds][:, None, :] <= self.room[machines][None, :, :]).all(axis=-1)
        ok &= self.admits[self.admission[kinds][:, None], machines]
        return np.asarray(ok)

    def fits_one(self, task: int, machine: int) -> bool:
        """Return whether a machine has room for one task."""
        return bool(self.fits(self.kind[task : task + 1], np.array([machine]))[0, 0])

    def keeps_rules(self, task: int, to: int) -> bool:
        """Return whether a job is no less even, and over none of its limits, after a move.

        The bin that gets the task has fewer than the one that loses it, so neither the fullest
        bin gets fuller nor the emptiest one emptier.
        """
        job, at = int(self.job[task]), int(self.where[task])
        for number, rule in enumerate(self.model.rules[job]):
            here, there = self.bin(rule, at), self.bin(rule, to)
            if here == there:
                continue
            if not rule.even:
                return False
            tasks = self.counts[job, number, there] + 1
            if tasks > self.counts[job, number, here] or 0 < rule.at_most < tasks:
                return False
        return True

    def bin(self, rule: BinRule, machine: int) -> int:
        """Return the bin of a machine by a rule."""
        return machine if rule.property < 0 else int(self.bins[rule.property, machine])

    # -- changing it

    def move(self, task: int, to: int) -> None:
        """Bring a task to another machine."""
        at, job = int(self.where[task]), int(self.job[task])
        for number, rule in enumerate(self.model.rules[job]):
            self.counts[job, number, self.bin(rule, at)] -= 1
            self.counts[job, number, self.bin(rule, to)] += 1
        self._charge(task, at, -1)
        self._charge(task, to, 1)
        self.on[at].remove(task)
        self.on[to].append(task)
        self.where[task] = to
        pair = np.array([at, to])
        self.cost[pair] = self.costs(pair, self.used[pair])

    def _charge(self, task: int, machine: int, sign: int) -> None:
        kind = self.kind[task]
        cpu = int((self.kind_cpu[kind] * self.grains[machine]).sum())
        self.room_cpu[machine] -= sign * cpu
        self.room[machine] -= sign * self.kind_needs[kind]
        self.used[machine] += sign * self.load[task]
