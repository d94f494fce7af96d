"""The baselines of the allocator: two simple allocators, and the optimum.

    scan   numpy checks every machine for every job and spreads it evenly over MSBs
    heap   the tightest machine that fits, from sorted lists; no spread
    HiGHS  the best there is, on instances small enough to solve

Both simple ones respect entitlements and take from the free pool, hold everything in memory and
store nothing. `quality` rates any of them by its placement.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from msgspec.structs import replace

from control_plane.api.machines import MachineRecord
from control_plane.broker.core.capacity import usable_memory
from vm_lab.region.generator import BY_NAME, GIB, make_region

SOLVE_S = 10.0
"""Seconds that the solver may take for each of three goals."""
FREE = 0
"""Number of the free pool among entitlements."""
_NONE = np.array([], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of each task of a job."""

    rru: float
    memory_bytes: int
    cpus: float = 0.0
    gpus: int = 0


class Machines:
    """A region as columns."""

    def __init__(self, records: Iterable[MachineRecord]) -> None:
        names, rru, memory, gpus, owner, msb, kind = [], [], [], [], [], [], []
        self.owners: dict[str, int] = {"": FREE}
        self.msbs: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        for record in records:
            assert record.hardware
            names.append(record.machine)
            rru.append(record.hardware.rru)
            memory.append(usable_memory(record.hardware.memory_bytes))
            gpus.append(record.hardware.gpus)
            owner.append(self.owners.setdefault(record.entitlement, len(self.owners)))
            msb.append(self.msbs.setdefault(record.location.msb, len(self.msbs)))
            kind.append(self.kinds.setdefault(record.machine_type, len(self.kinds)))
        self.names = names
        self.number = {name: number for number, name in enumerate(names)}
        self.rru = np.array(rru)
        self.memory = np.array(memory, dtype=np.int64)
        self.gpus = np.array(gpus, dtype=np.int64)
        self.owner = np.array(owner, dtype=np.int32)
        self.msb = np.array(msb, dtype=np.int32)
        self.kind = np.array(kind, dtype=np.int32)


class FullScan:
    """Examines for every job every machine that the entitlement may use: own machines before free
    ones, MSBs evenly. Machines are grouped by owner and kind, so machines of others are never
    examined.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.free_rru = machines.rru.copy()
        self.free_memory = machines.memory.copy()
        self.free_gpus = machines.gpus.copy()
        self.owner = machines.owner.copy()
        self.up = np.ones(len(machines.names), dtype=bool)
        order = np.lexsort((machines.kind, machines.owner))
        keys = machines.owner[order].astype(np.int64) * len(machines.kinds) + machines.kind[order]
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        self.parts = dict(zip(keys[starts].tolist(), np.split(order, starts[1:]), strict=True))

    def place(self, owner: int, kinds: Sequence[int], demand: Demand, tasks: int) -> list[int]:
        """Return machine numbers, one per task as far as there is room, and commit them."""
        placed: list[int] = []
        msbs = len(self.machines.msbs)
        while len(placed) < tasks:
            seen = np.concatenate(
                [self._part(pool, kind) for pool in (owner, FREE) for kind in kinds]
            )
            fits = (self.free_rru[seen] >= demand.rru) & self.up[seen]
            fits &= self.free_memory[seen] >= demand.memory_bytes
            fits &= self.free_gpus[seen] >= demand.gpus
            found = seen[fits]
            if not len(found):
                break
            msb = self.machines.msb[found]
            found = found[np.lexsort((self.owner[found] == FREE, msb))]
            msb = self.machines.msb[found]
            first = np.searchsorted(msb, np.arange(msbs))
            existing = np.bincount(self.machines.msb[placed], minlength=msbs) if placed else 0
            turn = np.arange(len(found)) - first[msb] + (existing[msb] if placed else 0)
            wanted = min(tasks - len(placed), len(found))
            chosen = found[np.argpartition(turn, wanted - 1)[:wanted]]
            self.free_rru[chosen] -= demand.rru
            self.free_memory[chosen] -= demand.memory_bytes
            self.free_gpus[chosen] -= demand.gpus
            self._take(chosen[self.owner[chosen] == FREE], owner)
            placed += chosen.tolist()
        return placed

    def _part(self, owner: int, kind: int) -> np.ndarray:
        return self.parts.get(owner * len(self.machines.kinds) + kind, _NONE)

    def _take(self, numbers: np.ndarray, owner: int) -> None:
        self.owner[numbers] = owner
        for kind in np.unique(self.machines.kind[numbers]).tolist():
            taken = numbers[self.machines.kind[numbers] == kind]
            count = len(self.machines.kinds)
            self.parts[owner * count + kind] = np.append(self._part(owner, kind), taken)
            left = self._part(FREE, kind)
            self.parts[FREE * count + kind] = left[~np.isin(left, taken)]

    def free(self, placed: Sequence[int], demand: Demand) -> None:
        """Free the resources of a job."""
        np.add.at(self.free_rru, placed, demand.rru)
        np.add.at(self.free_memory, placed, demand.memory_bytes)
        np.add.at(self.free_gpus, placed, demand.gpus)

    def set_up(self, machine: int, *, up: bool) -> None:
        """Take a machine out of service, or return it."""
        self.up[machine] = up


class BestFit:
    """Keeps machines sorted by their remaining capacity; takes the tightest that fits."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.free_rru: list[float] = machines.rru.tolist()
        self.free_memory: list[int] = machines.memory.tolist()
        self.owner: list[int] = machines.owner.tolist()
        self.kind: list[int] = machines.kind.tolist()
        self.lists: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        for number, (owner, kind) in enumerate(zip(self.owner, self.kind, strict=True)):
            self.lists[owner, kind].append((self.free_rru[number], number))
        for listed in self.lists.values():
            listed.sort()

    def place(self, owner: int, kinds: Sequence[int], demand: Demand, tasks: int) -> list[int]:
        """Return machine numbers, one per task as far as there is room, and commit them."""
        placed: list[int] = []
        for pool, kind in product((owner, FREE), kinds):
            while len(placed) < tasks:
                number = self._tightest(self.lists[pool, kind], demand)
                if number is None:
                    break
                self.owner[number] = owner
                self.free_memory[number] -= demand.memory_bytes
                self._put(number, self.free_rru[number] - demand.rru)
                placed.append(number)
        return placed

    def free(self, placed: Sequence[int], demand: Demand) -> None:
        """Free the resources of a job."""
        for number in placed:
            self.free_memory[number] += demand.memory_bytes
            self._take(number)
            self._put(number, self.free_rru[number] + demand.rru)

    def set_up(self, machine: int, *, up: bool) -> None:
        """Take a machine out of service, or return it."""
        if up:
            self._put(machine, self.free_rru[machine])
        else:
            self._take(machine)

    def _tightest(self, listed: list[tuple[float, int]], demand: Demand) -> int | None:
        for at in range(bisect.bisect_left(listed, (demand.rru, -1)), len(listed)):
            if self.free_memory[listed[at][1]] >= demand.memory_bytes:
                return listed.pop(at)[1]
        return None

    def _take(self, number: int) -> None:
        listed = self.lists[self.owner[number], self.kind[number]]
        at = bisect.bisect_left(listed, (self.free_rru[number], number))
        if at < len(listed) and listed[at][1] == number:
            listed.pop(at)

    def _put(self, number: int, free: float) -> None:
        self.free_rru[number] = free = max(0.0, round(free, 6))
        bisect.insort(self.lists[self.owner[number], self.kind[number]], (free, number))


# ── quality


@dataclass(frozen=True, slots=True)
class Placed:
    """A job's placement: machine names, one per placed task."""

    tasks: int
    demand: Demand
    machines: Sequence[str]


def quality(machines: Machines, placed: Mapping[str, Placed]) -> dict[str, float]:
    """Return how well jobs were placed, by measures that all allocators share.

    `spread`: mean of max - min tasks per MSB, over the MSBs of the region; `even`: the share of
    jobs with at most 1. `stranded_rru`: the remaining capacity of used machines with too little
    memory for a medium task, as a share of all that used machines have; `stranded_memory`:
    likewise.
    """
    free_rru, free_memory = machines.rru.copy(), machines.memory.astype(float)
    spreads, count, wanted = [], 0, 0
    used: set[int] = set()
    for job in placed.values():
        numbers = [machines.number[name] for name in job.machines]
        np.subtract.at(free_rru, numbers, job.demand.rru)
        np.subtract.at(free_memory, numbers, job.demand.memory_bytes)
        bins = np.bincount(machines.msb[numbers], minlength=len(machines.msbs))
        spreads.append(int(bins.max() - bins.min()))
        used |= set(numbers)
        count += len(numbers)
        wanted += job.tasks
    at = np.array(sorted(used), dtype=int)
    rru = float(np.median([job.demand.rru for job in placed.values()]))
    memory = float(np.median([job.demand.memory_bytes for job in placed.values()]))
    no_memory, no_rru = free_memory[at] < memory, free_rru[at] < rru
    return {
        "placed": round(count / max(1, wanted), 4),
        "spread": round(float(np.mean(spreads)), 2),
        "even": round(float(np.mean(np.array(spreads) <= 1)), 4),
        "machines_used": len(used),
        "stranded_rru": round(float(free_rru[at][no_memory].sum() / machines.rru[at].sum()), 4),
        "stranded_memory": round(
            float(free_memory[at][no_rru].sum() / machines.memory[at].sum()), 4
        ),
        "overcommitted": int(((free_rru < -1e-6) | (free_memory < -1)).sum()),
    }


# ── the optimum


def optimum(machines: Machines, jobs: Sequence[tuple[Demand, int]]) -> dict[str, float]:
    """Return the best for one entitlement that holds all machines: placed, spread, machines used.

    Most tasks first, then the smallest sum of max - min tasks per MSB, then fewest machines. Equal
    machines of an MSB are one class, and each possible content of one machine is a pattern. So the
    solver counts machines per (class, pattern) and never distinguishes two of them. The first two
    goals take a second; if the last runs out of time it has a value and a bound.
    """
    import highspy  # 29 MB: not in the process whose memory is measured

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("time_limit", SOLVE_S)
    inf = highspy.kHighsInf

    def column(upper: float, cost: float = 0, *, whole: bool = True) -> int:
        model.addCol(cost, 0, upper, 0, [], [])
        at = model.getNumCol() - 1
        if whole:
            model.changeColIntegrality(at, highspy.HighsVarType.kInteger)
        return at

    def row(low: float, high: float, terms: Mapping[int, float]) -> None:
        model.addRow(low, high, len(terms), list(terms), list(terms.values()))

    classes = Counter(
        zip(machines.msb.tolist(), machines.rru.tolist(), machines.memory.tolist(), strict=True)
    )
    per_bin: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # (job, MSB) -> terms
    used: dict[int, float] = {}
    for (msb, rru, memory), count in classes.items():
        own = {}
        for pattern in _patterns([demand for demand, _ in jobs], rru, memory):
            at = column(count)
            own[at] = 1.0
            for job, tasks in enumerate(pattern):
                if tasks:
                    per_bin[job, msb][at] = tasks
        row(0, count, own)
        used |= own
    spread: dict[int, float] = {}
    placed: dict[int, float] = {}
    for job, (_, tasks) in enumerate(jobs):
        most, least = column(tasks, whole=False), column(tasks, whole=False)
        spread |= {most: 1.0, least: -1.0}
        total: dict[int, float] = {}
        for msb in range(len(machines.msbs)):
            here = per_bin[job, msb]
            row(-inf, 0, here | {most: -1.0})
            row(0, inf, here | {least: -1.0})
            total |= here
        row(0, tasks, total)
        for at, value in total.items():
            placed[at] = placed.get(at, 0.0) + value
    best, proved, bound = [], True, 0.0
    known = None
    for goal, more in ((placed, True), (spread, False), (used, False)):
        for at in range(model.getNumCol()):
            model.changeColCost(at, goal.get(at, 0.0))
        model.changeObjectiveSense(
            highspy.ObjSense.kMaximize if more else highspy.ObjSense.kMinimize
        )
        if known is not None:
            model.setSolution(known)  # it is feasible: a goal that runs out of time has a value
        model.run()
        proved &= model.getModelStatus() == highspy.HighsModelStatus.kOptimal
        bound = model.getInfo().mip_dual_bound
        known = model.getSolution()
        best.append(round(sum(goal[at] * known.col_value[at] for at in goal)))
        row(best[-1] if more else -inf, inf if more else best[-1], goal)
    return {
        "placed": round(best[0] / sum(tasks for _, tasks in jobs), 4),
        "spread": round(best[1] / len(jobs), 2),
        "machines_used": best[2],
        "machines_bound": math.ceil(bound - 1e-6),
        "proved": proved,
    }


def _patterns(demands: Sequence[Demand], rru: float, memory: int) -> list[tuple[int, ...]]:
    """Return all ways to fill a machine, except the empty one."""
    found: list[tuple[tuple[int, ...], float, int]] = [((), rru + 1e-9, memory)]
    for demand in demands:
        found = [
            ((*head, n), left - n * demand.rru, room - n * demand.memory_bytes)
            for head, left, room in found
            for n in range(min(int(left / demand.rru), room // demand.memory_bytes) + 1)
        ]
    return [pattern for pattern, _, _ in found if any(pattern)]


def small_instance(seed: int) -> tuple[list[MachineRecord], list[tuple[Demand, int]]]:
    """Return 40 machines of two types in 8 MSBs, and 6 jobs that need most of them."""
    chance = random.Random(f"{seed} small")
    kinds = (BY_NAME["web-skylake"], BY_NAME["web-cooperlake"])
    machines = [
        replace(record, machine_type=kind.name, hardware=kind.hardware)
        for number, record in enumerate(make_region(40, 2, 4, seed))
        for kind in (kinds[number % 3 == 0],)
    ]
    jobs = [
        (
            Demand(round(chance.uniform(0.3, 0.6), 2), chance.randrange(12, 36) * GIB),
            chance.randrange(7, 16),
        )
        for _ in range(6)
    ]
    return machines, jobs
