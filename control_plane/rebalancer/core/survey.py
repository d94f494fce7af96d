"""From the allocator's index and the jobs' records to the solver's model, in steps of bounded time.

Rooms, requirements and rules are the allocator's own: what is left on a machine is what its index
says, where a task may run is what `feasibility.admits` says, and how a job is spread is what its
preferences say. Only entitlements with machines take part. Free machines are offered to those that
have hot ones.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from control_plane.allocator.core.claims import Claim, Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import admits, bin_of
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import STEP, RegionIndex
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.broker.core.assignment import FREE
from control_plane.rebalancer.core.model import (
    BinRule,
    RegionModel,
    TaskColumns,
    TaskKind,
    Weights,
)

_MICRO_GPUS = 1_000_000
_GIB = 1 << 30
Load = tuple[float, float, float]
"""CPU in RRU, memory in bytes, network in Mbit/s."""


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What the survey must know of a job besides its claims."""

    preferences: Sequence[Preference]
    movable: Callable[[int], bool]
    """Whether this task may move now."""


@dataclass(frozen=True, slots=True)
class SurveySources:
    """What the survey asks."""

    index: RegionIndex
    terms: Callable[[str], JobTerms | None]
    """Of a job; None: none of its tasks may move."""
    measured: Callable[[str, int, Machine], Load | None]
    """What a task uses; None: not measured."""
    offered: Callable[[str, Mapping[str, int], int], Sequence[Machine]]
    """Free machines that a pool may take: where it has how many hot ones, and how many at most."""


def sizes_of(machine: Machine) -> Load:
    """Return what a machine's load is compared with."""
    capacity = machine.capacity
    return capacity.rru, float(capacity.memory_bytes), float(capacity.network_mbps)


def claimed_load(demand: Demand, machine: Machine) -> Load:
    """Return what a task uses on a machine if it uses what it claims."""
    cpu = machine.capacity.rru_of(demand.cpu_on(machine.capacity))
    return cpu, float(demand.memory_bytes), float(demand.network_mbps)


def hottest(used: Sequence[float], machine: Machine) -> float:
    """Return the share that is used of what a machine has least of."""
    sizes = sizes_of(machine)
    return max((u / s for u, s in zip(used, sizes, strict=True) if s > 0), default=0.0)


class Survey:
    """Collects a model; one object for one model."""

    def __init__(self, sources: SurveySources, weights: Weights, free_machines: int) -> None:
        """Collect nothing yet."""
        self._sources, self._weights = sources, weights
        self._free_left = free_machines
        self._machines: list[Machine] = []
        self._number: dict[Machine, int] = {}
        self._pool_of: list[int] = []
        self._pools: list[str] = []
        self._is_free: list[bool] = []
        self._kinds: dict[tuple[object, ...], int] = {}
        self._made: list[TaskKind] = []
        self._admissions: dict[tuple[object, ...], tuple[int, Demand]] = {}
        self._properties: dict[str, int] = {Property.MSB: 0}
        self._rules: list[list[BinRule]] = []
        self._jobs: list[str] = []
        self._columns = {name: array("i") for name in ("job", "index", "kind", "machine")}
        self._loads: array[float] = array("d")
        self._prices: array[float] = array("d")
        self._can = bytearray()
        self._used: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._measured = 0

    def run(self) -> Generator[None, None, RegionModel]:
        """Collect everything; others may have their turn at each step."""
        index = self._sources.index
        for name in sorted(index.pools):
            if name != FREE:
                yield from self._add_pool(name, list(index.pools[name].machines()))
        for job in sorted(index.claims):
            claims = index.claims.get(job)
            if claims is not None:
                yield from self._add_job(job, claims)
        yield from self._offer()
        return (yield from self._model())

    # -- what there is

    def _add_pool(self, name: str, machines: list[Machine]) -> Generator[None, None, None]:
        self._pools.append(name)
        for number, machine in enumerate(sorted(machines, key=lambda m: m.name)):
            self._add_machine(machine, len(self._pools) - 1, is_free=False)
            if number % STEP == STEP - 1:
                yield

    def _add_machine(self, machine: Machine, pool: int, *, is_free: bool) -> None:
        self._number[machine] = len(self._machines)
        self._machines.append(machine)
        self._pool_of.append(pool)
        self._is_free.append(is_free)

    def _add_job(self, name: str, claims: Claims) -> Generator[None, None, None]:
        terms = self._sources.terms(name) if claims.reserved is None else None
        job = len(self._jobs)
        self._jobs.append(name)
        self._rules.append([self._rule(p) for p in terms.preferences] if terms else [])
        for number, claim in enumerate(claims):
            at = self._number.get(claim.machine)
            if at is not None:
                self._add_task(job, claim, at, terms)
            if number % STEP == STEP - 1:
                yield

    def _add_task(self, job: int, claim: Claim, at: int, terms: JobTerms | None) -> None:
        demand, machine = claim.demand, claim.machine
        load = self._sources.measured(self._jobs[job], claim.task, machine)
        self._measured += load is not None
        load = load or claimed_load(demand, machine)
        columns = self._columns
        columns["job"].append(job)
        columns["index"].append(claim.task)
        columns["kind"].append(self._kind(demand))
        columns["machine"].append(at)
        self._loads.extend(load)
        self._prices.append(self._weights.move_per_gib * demand.memory_bytes / _GIB)
        self._can.append(terms is not None and terms.movable(claim.task))
        used = self._used[at]
        for place, part in enumerate(load):
            used[place] += part

    def _kind(self, demand: Demand) -> int:
        key = demand.size
        found = self._kinds.get(key)
        if found is None:
            admission, _ = self._admissions.setdefault(
                tuple(demand.requires), (len(self._admissions), demand)
            )
            gpus = -int(-demand.gpus * _MICRO_GPUS // 1)
            needs = (demand.memory_bytes, gpus, demand.network_mbps, demand.disk_bytes)
            found = self._kinds[key] = len(self._made)
            self._made.append(
                TaskKind(
                    demand.micro_rru, demand.micro_cpus, (*needs, len(demand.ports)), admission
                )
            )
        return found

    def _rule(self, preference: Preference) -> BinRule:
        """Return what a preference means: what is no plain `even` keeps tasks in their bins."""
        at = -1
        if preference.property != Property.MACHINE:
            at = self._properties.setdefault(preference.property, len(self._properties))
        even = preference.strategy is Strategy.EVEN and not preference.weights
        return BinRule(at, even, preference.at_most or 0)

    def _offer(self) -> Generator[None, None, None]:
        """List free machines as those of pools that have hot ones."""
        hot: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for at, used in self._used.items():
            machine = self._machines[at]
            if hottest(used, machine) > self._weights.hot_from:
                hot[self._pool_of[at]][machine.place.msb] += 1
        for pool, msbs in sorted(hot.items()):
            wanted = min(msbs.total(), self._free_left)
            for machine in self._sources.offered(self._pools[pool], msbs, wanted):
                if machine not in self._number:
                    self._add_machine(machine, pool, is_free=True)
                    self._free_left -= 1
            yield

    # -- what is made of it

    def _model(self) -> Generator[None, None, RegionModel]:
        bins, admissions = list[list[int]](), list[bytes]()
        for name in self._properties:
            bins.append((yield from self._bins(name)))
        for _, demand in self._admissions.values():
            mask = bytearray()
            for number, machine in enumerate(self._machines):
                mask.append(admits(demand, machine))
                if number % STEP == STEP - 1:
                    yield
            admissions.append(bytes(mask))
        machines, why_short = self._machines, self._sources.index.why_short
        return RegionModel(
            weights=self._weights,
            pools=self._pools,
            machines=[m.name for m in machines],
            pool_of=self._pool_of,
            is_free=self._is_free,
            is_open=[not (m.blocked or (not m.jobs and why_short(m))) for m in machines],
            sizes=[sizes_of(m) for m in machines],
            cpu_grains=[(m.capacity.per_rru, m.capacity.per_cpu) for m in machines],
            room_cpu=[m.free_cpu for m in machines],
            room=[_room(m) for m in machines],
            bins=bins,
            admissions=admissions,
            jobs=self._jobs,
            rules=self._rules,
            kinds=self._made,
            tasks=TaskColumns(
                **{name: column.tobytes() for name, column in self._columns.items()},
                load=self._loads.tobytes(),
                price=self._prices.tobytes(),
                can_move=bytes(self._can),
            ),
            measured=self._measured,
        )

    def _bins(self, name: str) -> Generator[None, None, list[int]]:
        numbers: dict[str, int] = {}
        found = []
        for number, machine in enumerate(self._machines):
            found.append(numbers.setdefault(bin_of(name, machine), len(numbers)))
            if number % STEP == STEP - 1:
                yield
        return found


def _room(machine: Machine) -> tuple[int, int, int, int, int]:
    gpus = int(machine.free_gpus * _MICRO_GPUS)
    rest = (machine.free_network, machine.free_disk, machine.free_ports)
    return (machine.free_memory, gpus, *rest)


def used_on(
    machine: Machine, load: Callable[[Claim], Load], claims: Mapping[str, Claims]
) -> list[float]:
    """Return what the tasks of one machine use now."""
    used = [0.0, 0.0, 0.0]
    for job in dict.fromkeys(holder.job for holder in machine.jobs):
        for claim in claims.get(job) or ():
            if claim.machine is machine:
                used = [u + part for u, part in zip(used, load(claim), strict=True)]
    return used
