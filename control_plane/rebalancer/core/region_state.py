"""The state of a region in the solver, on numpy: where tasks are, free room, and what that costs.

Moves change a `RegionState`, which always knows the cost of each machine. Rooms are exact integers,
as in the allocator; only loads are floating-point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from itertools import pairwise

import numpy as np

from control_plane.rebalancer.core.arrays import Flags, Floats, Ints
from control_plane.rebalancer.core.model import DIMENSIONS, BinRule, RegionModel


class PlacePower:
    """The power draw of places with power budgets, and its cost."""

    def __init__(self, model: RegionModel, used_rru: Floats) -> None:
        """`used_rru`: CPU use of each machine, in RRU."""
        self.is_budgeted = bool(model.places)
        self._names: list[str] = [place.name for place in model.places]
        self._watts_per_rru: Floats = np.array(model.watts_per_rru, np.float64)
        self._places: Ints = np.array(model.places_of, np.int64).reshape(
            len(model.places_of), len(model.machines)
        )
        # the last entry stands for machines in no place, which have no limit
        self._limit_w = np.array([*(p.limit_w for p in model.places), np.inf])
        machine_w = np.array([*(p.machine_w for p in model.places), 1.0])
        self._cost_per_watt = model.weights.power / np.maximum(machine_w, 1e-9)
        self.drawn_w = np.array([*(p.base_w for p in model.places), 0.0])
        for places in self._places if self.is_budgeted else ():
            np.add.at(self.drawn_w, places, self._watts_per_rru * used_rru)
        self.drawn_w[-1] = 0.0

    def copy(self) -> PlacePower:
        """Return an independent copy."""
        other = copy(self)
        other.drawn_w = self.drawn_w.copy()
        return other

    def cost(self) -> float:
        """Return the cost of the power that all places draw above their limits."""
        return float(self._costs(np.arange(len(self.drawn_w)), self.drawn_w).sum())

    def _costs(self, places: Ints, drawn_w: Floats) -> Floats:
        """Return the cost of each place at a power draw."""
        over_w = np.maximum(drawn_w - self._limit_w[places], 0.0)
        return np.asarray(over_w * self._cost_per_watt[places])

    def machines_over_budget(self) -> Flags:
        """Return for each machine whether it is in a place above its limit."""
        over = self.drawn_w > self._limit_w + 1e-6
        return np.asarray(over[self._places].any(axis=0))

    def is_over_budget(self, machine: int) -> bool:
        """Return whether a machine is in a place above its limit."""
        places = self._places[:, machine]
        return self.is_budgeted and bool((self.drawn_w > self._limit_w + 1e-6)[places].any())

    def relieved_place(self, source: int, target: int) -> str:
        """Return a place above its limit that a move between two machines relieves; empty: none."""
        for left, entered in self._places[:, [source, target]] if self.is_budgeted else ():
            if left != entered and self.drawn_w[left] > self._limit_w[left]:
                return self._names[int(left)]
        return ""

    def gains(self, rru: Floats, source: int, targets: Ints) -> Floats:
        """Return the gain if the CPU use `rru` (rows) moves from a machine to each target.

        `rru` has one column, or one for each target.
        """
        less_w, more_w = rru * self._watts_per_rru[source], rru * self._watts_per_rru[targets]
        gain = np.zeros(np.broadcast_shapes(rru.shape, (1, len(targets))))
        for places in self._places:
            left, entered = places[source : source + 1], places[targets]
            before = self._costs(left, self.drawn_w[left])
            after_w = self.drawn_w[left] - less_w
            gain_left = before - self._costs(left, after_w)
            loss_entered = self._costs(entered, self.drawn_w[entered] + more_w)
            loss_entered = loss_entered - self._costs(entered, self.drawn_w[entered])
            gain_within = before - self._costs(left, after_w + more_w)
            gain += np.where(left == entered, gain_within, gain_left - loss_entered)
        return gain

    def move(self, rru: float, source: int, target: int) -> None:
        """Count CPU use on another machine."""
        for places in self._places if self.is_budgeted else ():
            self.drawn_w[places[source]] -= rru * self._watts_per_rru[source]
            self.drawn_w[places[target]] += rru * self._watts_per_rru[target]
        self.drawn_w[-1] = 0.0


class RegionState:
    """The placement of all tasks, and its cost."""

    def __init__(self, model: RegionModel) -> None:
        machines, dimensions, columns = len(model.machines), len(DIMENSIONS), model.tasks
        self.model, weights = model, model.weights
        self.pool = np.array(model.pool_of, np.int64)
        self.sizes: Floats = np.array(model.sizes, np.float64).reshape(machines, dimensions)
        self.is_free = np.array(model.is_free, np.bool_)
        self.is_open = np.array(model.is_open, np.bool_)
        self.grains: Ints = np.array(model.cpu_grains, np.int64).reshape(machines, 2)
        self.room_cpu = np.array(model.room_cpu, np.int64)
        self.room: Ints = np.array(model.room, np.int64).reshape(machines, 5)
        self.where = np.frombuffer(columns.machine, np.int32).astype(np.int64)
        self.load: Floats = np.frombuffer(columns.load, np.float64).reshape(-1, dimensions)
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
        self.used = self._usage()
        self.pool_limits = self._average_shares(len(model.pools)) + weights.tolerance
        self.limits = self.pool_limits[self.pool]
        """By machine and dimension: the share of use above which it costs."""
        self.tasks_on = self._tasks_by_machine(machines)
        self.counts = self._tasks_by_bin()
        """Job, number of its rule, bin → its tasks there."""
        self.cost = self.costs(np.arange(machines), self.used)
        self.power = PlacePower(model, self.used[:, 0])

    def copy(self) -> RegionState:
        """Return an independent copy."""
        other = copy(self)
        for name in ("where", "room_cpu", "room", "used", "cost"):
            setattr(other, name, getattr(self, name).copy())
        other.power = self.power.copy()
        other.tasks_on = [tasks.copy() for tasks in self.tasks_on]
        other.counts = self.counts.copy()
        return other

    def _usage(self) -> Floats:
        """Return the use of each machine by dimension, as the sum over its tasks."""
        machines = len(self.model.machines)
        return np.stack([np.bincount(self.where, each, machines) for each in self.load.T], axis=1)

    def _tasks_by_machine(self, machines: int) -> list[list[int]]:
        """Return the tasks on each machine."""
        order = np.argsort(self.where, kind="stable")
        edges = np.searchsorted(self.where[order], np.arange(machines + 1)).tolist()
        tasks = order.tolist()
        return [tasks[a:b] for a, b in pairwise(edges)]

    def _tasks_by_bin(self) -> Counter[tuple[int, int, int]]:
        """Count the tasks of each job by rule and bin, with numpy: there may be a million tasks."""
        counts: Counter[tuple[int, int, int]] = Counter()
        rules = self.model.rules
        for number in range(max(map(len, rules), default=0)):
            of_job = [each[number].property if number < len(each) else -2 for each in rules]
            of_task = np.array(of_job, np.int64)[self.job]
            for property_ in set(of_job) - {-2}:
                tasks = np.nonzero(of_task == property_)[0]
                machines = self.where[tasks]
                bins = machines if property_ < 0 else self.bins[property_, machines]
                width = int(bins.max(initial=0)) + 1
                keys, sizes = np.unique(self.job[tasks] * width + bins, return_counts=True)
                for key, tasks_in_bin in zip(keys.tolist(), sizes.tolist(), strict=True):
                    counts[key // width, number, key % width] = tasks_in_bin
        return counts

    def _average_shares(self, pools: int) -> Floats:
        """Return by pool and dimension the share that is used of the pool's own machines."""
        used, sizes = np.zeros((pools, len(DIMENSIONS))), np.zeros((pools, len(DIMENSIONS)))
        own = ~self.is_free
        np.add.at(used, self.pool, np.where(self.sizes > 0, self.used, 0.0))
        np.add.at(sizes, self.pool[own], self.sizes[own])
        return np.asarray(used / np.maximum(sizes, 1e-12))

    def costs(self, machines: Ints, used: Floats) -> Floats:
        """Return the cost of each machine at the use `used`, whose last axis is the dimension."""
        costs = self.costs_by_dimension(machines, used)
        cpu_and_memory = costs[..., 0] + costs[..., 1]  # numpy's sum is slow on short axes
        return np.asarray(cpu_and_memory + costs[..., 2])

    def costs_by_dimension(self, machines: Ints, used: Floats) -> Floats:
        """Return the cost of each machine by dimension."""
        weights = self.model.weights
        shares = used * self.per_size[machines]
        over = np.maximum(shares - self.limits[machines], 0.0)
        hot = np.maximum(shares - weights.hot_from, 0.0)
        return np.asarray(weights.balance * over + weights.hot * hot)

    def goals(self) -> dict[str, float]:
        """Return the value of each goal, computed again from where the tasks are."""
        weights, used = self.model.weights, self._usage()
        shares = used * self.per_size
        over = weights.balance * np.maximum(shares - self.limits, 0.0).sum(axis=0)
        hot = weights.hot * np.maximum(shares - weights.hot_from, 0.0).sum(axis=0)
        goals = {f"balance of {name}": float(over[d]) for d, name in enumerate(DIMENSIONS)}
        goals |= {f"hot in {name}": float(hot[d]) for d, name in enumerate(DIMENSIONS)}
        if self.power.is_budgeted:
            goals["power above budgets"] = PlacePower(self.model, used[:, 0]).cost()
        return goals

    def count_hot(self) -> int:
        """Return how many machines are hot in some dimension."""
        shares = self.used * self.per_size
        return int((shares > self.model.weights.hot_from + 1e-9).any(axis=1).sum())

    # -- what is allowed

    def fits(self, kinds: Ints, machines: Ints) -> Flags:
        """Return for each kind (rows) and machine (columns) whether there is room."""
        # the tasks of a machine are of few kinds
        kinds, which = np.unique(kinds, return_inverse=True)
        rru, cpus = self.kind_cpu[kinds, 0], self.kind_cpu[kinds, 1]
        grains = self.grains[machines]
        cpu = rru[:, None] * grains[:, 0] + cpus[:, None] * grains[:, 1]
        ok = cpu <= self.room_cpu[machines]
        needs, room = self.kind_needs[kinds].T, self.room[machines].T
        for need, left in zip(needs, room, strict=True):
            ok &= need[:, None] <= left
        ok &= self.admits[self.admission[kinds][:, None], machines]
        return np.asarray(ok[which])

    def fits_one(self, task: int, machine: int) -> bool:
        """Return whether a machine has room for one task."""
        return bool(self.fits(self.kind[task : task + 1], np.array([machine]))[0, 0])

    def keeps_rules(self, task: int, target: int) -> bool:
        """Return whether a move keeps the limits of the task's job, and keeps it as even as it is.

        The bin that the task enters must have fewer tasks than the one that it leaves. So the
        largest count never grows, and the smallest one never falls.
        """
        job = int(self.job[task])
        for number, rule, left, entered in self.changed_bins(task, target):
            if not rule.even:
                return False
            tasks = self.counts[job, number, entered] + 1
            if tasks > self.counts[job, number, left] or 0 < rule.at_most < tasks:
                return False
        return True

    def changed_bins(self, task: int, target: int) -> Iterator[tuple[int, BinRule, int, int]]:
        """Yield the rules whose bin a move changes: number, rule, the bins left and entered."""
        source = int(self.where[task])
        for number, rule in enumerate(self.model.rules[int(self.job[task])]):
            left, entered = self.bin(rule, source), self.bin(rule, target)
            if left != entered:
                yield number, rule, left, entered

    def bin(self, rule: BinRule, machine: int) -> int:
        """Return the bin of a machine by a rule."""
        return machine if rule.property < 0 else int(self.bins[rule.property, machine])

    # -- changing it

    def move(self, task: int, target: int) -> None:
        """Move a task to another machine."""
        source, job = int(self.where[task]), int(self.job[task])
        for number, rule in enumerate(self.model.rules[job]):
            self.counts[job, number, self.bin(rule, source)] -= 1
            self.counts[job, number, self.bin(rule, target)] += 1
        self._charge(task, source, -1)
        self._charge(task, target, 1)
        self.power.move(float(self.load[task, 0]), source, target)
        self.tasks_on[source].remove(task)
        self.tasks_on[target].append(task)
        self.where[task] = target
        pair = np.array([source, target])
        self.cost[pair] = self.costs(pair, self.used[pair])

    def _charge(self, task: int, machine: int, sign: int) -> None:
        """Charge a task to a machine (`sign` 1), or free what it was charged (-1)."""
        kind = self.kind[task]
        cpu = int((self.kind_cpu[kind] * self.grains[machine]).sum())
        self.room_cpu[machine] -= sign * cpu
        self.room[machine] -= sign * self.kind_needs[kind]
        self.used[machine] += sign * self.load[task]
