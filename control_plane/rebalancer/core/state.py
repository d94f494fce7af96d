"""The model on numpy: where tasks are, what is left on machines, and what that costs.

One `State` is changed by moves and knows the cost of each machine at every moment. Rooms are exact
integers, as in the allocator; only loads are floating-point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from copy import copy
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from control_plane.rebalancer.core.model import DIMENSIONS, BinRule, RegionModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class PlacePower:
    """The power draw of places with power budgets, and its cost."""

    def __init__(self, model: RegionModel, used_rru: Floats) -> None:
        """`used_rru`: CPU use of each machine, in RRU."""
        self.is_budgeted = bool(model.places)
        self._names: list[str] = [place.name for place in model.places]
        self._watts: Floats = np.array(model.watts_per_rru, np.float64)
        self._places: Ints = np.array(model.places_of, np.int64).reshape(
            len(model.places_of), len(model.machines)
        )
        # the last one is for machines in no place: it has no limit
        self._limit = np.array([*(p.limit_w for p in model.places), np.inf])
        unit = np.array([*(p.machine_w for p in model.places), 1.0])
        self._per_watt = model.weights.power / np.maximum(unit, 1e-9)
        self.drawn = np.array([*(p.base_w for p in model.places), 0.0])
        for level in self._places if self.is_budgeted else ():
            np.add.at(self.drawn, level, self._watts * used_rru)
        self.drawn[-1] = 0.0

    def copy(self) -> PlacePower:
        """Return one that is changed apart from this one."""
        other = copy(self)
        other.drawn = self.drawn.copy()
        return other

    def total(self) -> float:
        """Return what is drawn above budgets, weighted."""
        return float(self._costs(np.arange(len(self.drawn)), self.drawn).sum())

    def _costs(self, places: Ints, drawn: Floats) -> Floats:
        return np.asarray(np.maximum(drawn - self._limit[places], 0.0) * self._per_watt[places])

    def hot(self) -> Flags:
        """Return of each machine whether a place above its budget has it."""
        over = self.drawn > self._limit + 1e-6
        return np.asarray(over[self._places].any(axis=0))

    def is_over(self, machine: int) -> bool:
        """Return whether a place above its budget has this machine."""
        places = self._places[:, machine]
        return self.is_budgeted and bool((self.drawn > self._limit + 1e-6)[places].any())

    def relieved(self, at: int, to: int) -> str:
        """Return a place above its budget that a move takes load from; empty: none."""
        for here, there in self._places[:, [at, to]] if self.is_budgeted else ():
            if here != there and self.drawn[here] > self._limit[here]:
                return self._names[int(here)]
        return ""

    def gains(self, rru: Floats, machine: int, targets: Ints) -> Floats:
        """Return the gain if the CPU use `rru` (rows) moves from a machine to each target.

        `rru` has one column, or one for each target.
        """
        less, more = rru * self._watts[machine], rru * self._watts[targets]
        found = np.zeros(np.broadcast_shapes(rru.shape, (1, len(targets))))
        for level in self._places:
            here, there = level[machine : machine + 1], level[targets]
            was, after = self._costs(here, self.drawn[here]), self.drawn[here] - less
            left = was - self._costs(here, after)
            came = self._costs(there, self.drawn[there] + more)
            came = came - self._costs(there, self.drawn[there])
            within = was - self._costs(here, after + more)
            found += np.where(here == there, within, left - came)
        return found

    def move(self, rru: float, at: int, to: int) -> None:
        """Count CPU on another machine."""
        for level in self._places if self.is_budgeted else ():
            self.drawn[level[at]] -= rru * self._watts[at]
            self.drawn[level[to]] += rru * self._watts[to]
        self.drawn[-1] = 0.0


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
        self.used = self._summed()
        self.level = self._levels(len(model.pools)) + weights.tolerance
        self.limit = self.level[self.pool]
        """By machine: what is above costs."""
        self.on = self._tasks_by_machine(machines)
        self.counts = self._counted()
        """Job, number of its rule, bin → its tasks there."""
        self.cost = self.costs(np.arange(machines), self.used)
        self.power = PlacePower(model, self.used[:, 0])

    def copy(self) -> State:
        """Return a state that is changed apart from this one."""
        other = copy(self)
        for name in ("where", "room_cpu", "room", "used", "cost"):
            setattr(other, name, getattr(self, name).copy())
        other.power = self.power.copy()
        other.on = [tasks.copy() for tasks in self.on]
        other.counts = self.counts.copy()
        return other

    def _summed(self) -> Floats:
        """Add up what is used of each machine, by dimension."""
        machines = len(self.model.machines)
        return np.stack([np.bincount(self.where, each, machines) for each in self.load.T], axis=1)

    def _tasks_by_machine(self, machines: int) -> list[list[int]]:
        order = np.argsort(self.where, kind="stable")
        edges = np.searchsorted(self.where[order], np.arange(machines + 1)).tolist()
        tasks = order.tolist()
        return [tasks[a:b] for a, b in pairwise(edges)]

    def _counted(self) -> Counter[tuple[int, int, int]]:
        """Count the tasks of each job by rule and bin: for a million at once, not one by one."""
        found: Counter[tuple[int, int, int]] = Counter()
        rules = self.model.rules
        for number in range(max(map(len, rules), default=0)):
            of_job = [each[number].property if number < len(each) else -2 for each in rules]
            asked = np.array(of_job, np.int64)[self.job]
            for name in set(of_job) - {-2}:
                tasks = np.nonzero(asked == name)[0]
                machines = self.where[tasks]
                bins = machines if name < 0 else self.bins[name, machines]
                width = int(bins.max(initial=0)) + 1
                keys, counts = np.unique(self.job[tasks] * width + bins, return_counts=True)
                jobs, bins = keys // width, keys % width
                for job, at, n in zip(jobs.tolist(), bins.tolist(), counts.tolist(), strict=True):
                    found[job, number, at] = n
        return found

    def _levels(self, pools: int) -> Floats:
        """Return by pool and dimension how much of its own machines is used."""
        used, sizes = np.zeros((pools, len(DIMENSIONS))), np.zeros((pools, len(DIMENSIONS)))
        own = ~self.is_free
        np.add.at(used, self.pool, np.where(self.sizes > 0, self.used, 0.0))
        np.add.at(sizes, self.pool[own], self.sizes[own])
        return np.asarray(used / np.maximum(sizes, 1e-12))

    def costs(self, machines: Ints, used: Floats) -> Floats:
        """Return the cost of each machine at the use `used`; the last axis is reduced."""
        parts = self.parts(machines, used)
        found = parts[..., 0] + parts[..., 1]  # numpy reduces short axes slowly
        return np.asarray(found + parts[..., 2])

    def parts(self, machines: Ints, used: Floats) -> Floats:
        """Return the same by dimension."""
        weights = self.model.weights
        shares = used * self.per_size[machines]
        over = np.maximum(shares - self.limit[machines], 0.0)
        hot = np.maximum(shares - weights.hot_from, 0.0)
        return np.asarray(weights.balance * over + weights.hot * hot)

    def goals(self) -> dict[str, float]:
        """Return what each goal is now, counted again from where the tasks are."""
        weights, used = self.model.weights, self._summed()
        shares = used * self.per_size
        over = weights.balance * np.maximum(shares - self.limit, 0.0).sum(axis=0)
        hot = weights.hot * np.maximum(shares - weights.hot_from, 0.0).sum(axis=0)
        found = {f"balance of {name}": float(over[at]) for at, name in enumerate(DIMENSIONS)}
        found |= {f"hot in {name}": float(hot[at]) for at, name in enumerate(DIMENSIONS)}
        if self.power.is_budgeted:
            found["power above budgets"] = PlacePower(self.model, used[:, 0]).total()
        return found

    def hot(self) -> int:
        """Return how many machines are hot in some dimension."""
        shares = self.used * self.per_size
        return int((shares > self.model.weights.hot_from + 1e-9).any(axis=1).sum())

    # -- what is allowed

    def fits(self, kinds: Ints, machines: Ints) -> Flags:
        """Return for each kind (rows) and machine (columns) whether there is room."""
        kinds, which = np.unique(kinds, return_inverse=True)  # tasks of a machine are of few
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

    def keeps_rules(self, task: int, to: int) -> bool:
        """Return whether a job is no less even, and over none of its limits, after a move.

        The bin that gets the task has fewer than the one that loses it, so neither the fullest
        bin gets fuller nor the emptiest one emptier.
        """
        job = int(self.job[task])
        for number, rule, here, there in self.crossed(task, to):
            if not rule.even:
                return False
            tasks = self.counts[job, number, there] + 1
            if tasks > self.counts[job, number, here] or 0 < rule.at_most < tasks:
                return False
        return True

    def crossed(self, task: int, to: int) -> Iterator[tuple[int, BinRule, int, int]]:
        """Yield each rule by which a move leads to another bin, with its number and both bins."""
        at = int(self.where[task])
        for number, rule in enumerate(self.model.rules[int(self.job[task])]):
            here, there = self.bin(rule, at), self.bin(rule, to)
            if here != there:
                yield number, rule, here, there

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
        self.power.move(float(self.load[task, 0]), at, to)
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
