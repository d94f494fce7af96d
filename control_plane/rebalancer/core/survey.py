"""From the allocator's index and the jobs' records to the solver's model, in steps of bounded time.

Rooms, requirements and rules are the allocator's own: what is left on a machine is what its index
says, where a task may run is what `feasibility.admits` says, and how a job is spread is what its
preferences say. Only entitlements with machines take part. Free machines are offered to those that
have hot ones.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from typing import Any

from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import admits, bin_of
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.region_index import STEP, RegionIndex
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.broker.core.assignment import FREE
from control_plane.rebalancer.core.loads import watts_per_rru
from control_plane.rebalancer.core.machine_use import (
    Load,
    PlaceDraw,
    claimed_load,
    claimed_rru,
    hottest,
    sizes_of,
)
from control_plane.rebalancer.core.model import (
    DIMENSIONS,
    BinRule,
    RegionModel,
    TaskColumns,
    TaskKind,
    Weights,
)

DOWN = "is down"
"""Why a machine takes no tasks that draws nothing (`Allocator`)."""
_ASKED = 4
"""Free machines that are asked for, for each that is to be found where there is power."""
_MICRO_GPUS = 1_000_000
_GIB = 1 << 30
Measured = Callable[[str, Sequence[int]], list[Load | None]]
"""What tasks of a job use; None: not measured."""


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What the survey must know of a job besides its claims."""

    preferences: Sequence[Preference]
    movable: Callable[[int], bool]
    """Whether this task may move now."""


@dataclass(frozen=True, slots=True)
class SurveySources:
    """What the survey asks."""

    indexes: Sequence[RegionIndex]
    """One for each shard: of all machines, with the claims of its own pools' jobs."""
    owner: Callable[[str], RegionIndex]
    """Of a pool."""
    terms: Callable[[str], JobTerms | None]
    """Of a job; None: none of its tasks may move."""
    measured: Measured
    offered: Callable[[str, Mapping[str, int], int], Sequence[Machine]]
    """Free machines that a pool may take: where it has how many hot ones, and how many at most."""
    drawn: Callable[[Machine, float], tuple[float, bool]]
    """Power draw in watts at a CPU use, and whether it was measured by the host."""
    capped: Callable[[Machine], bool]
    """Whether the power of a machine is capped now."""
    swappable: Callable[[Machine], bool] | None
    """Whether its entitlement may exchange a machine; None: none is exchanged."""
    stack_of: Callable[[str], object] = lambda _pool: None
    """Of a pool with few machines what those with which it could share have in common; None: it
    is large, or shares already."""
    limit_share: float = 0.95
    """Of a budget, what may be drawn before that costs."""


class Survey:
    """Collects a model; one object for one model."""

    def __init__(
        self,
        sources: SurveySources,
        weights: Weights,
        free_machines: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Collect nothing yet; `only` these pools, which is exact as far as no other is touched."""
        self._sources, self._weights, self._only = sources, weights, only
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
        self._used = [array("d") for _ in DIMENSIONS]
        """By dimension, what is used of each machine."""
        self._measured = 0
        self._draws: dict[str, PlaceDraw] = {}
        """By place with a power budget."""

    def run(self) -> Generator[None, None, RegionModel]:
        """Collect everything; others may have their turn at each step."""
        sources, indexes = self._sources, self._sources.indexes
        for name in sorted({pool for index in indexes for pool in index.pools} - {FREE}):
            if self._only is None or name in self._only:
                yield from self._add_pool(name, list(sources.owner(name).pool(name).machines()))
        of_job = {job: index for index in indexes for job in index.claims}
        for job in sorted(of_job):
            claims = of_job[job].claims.get(job)
            if claims is not None and (self._only is None or claims.pool in self._only):
                yield from self._add_job(job, claims)
        yield from self._add_up_power()
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
        for column in self._used:
            column.append(0.0)

    def _add_job(self, name: str, claims: Claims) -> Generator[None, None, None]:
        terms = self._sources.terms(name) if claims.reserved is None else None
        job = len(self._jobs)
        self._jobs.append(name)
        self._rules.append([self._rule(p) for p in terms.preferences] if terms else [])
        for first in range(0, len(claims.machines), STEP):
            self._add_tasks(job, *claims.between(first, first + STEP), terms)
            yield

    def _add_tasks(
        self,
        job: int,
        tasks: list[int],
        machines: list[Machine],
        demands: list[Demand],
        terms: JobTerms | None,
    ) -> None:
        """List tasks of one job; there may be a million, so columns get many at once."""
        where = [self._number.get(machine, -1) for machine in machines]
        if -1 in where:
            here = [number for number, at in enumerate(where) if at >= 0]
            tasks, machines = [tasks[n] for n in here], [machines[n] for n in here]
            demands, where = [demands[n] for n in here], [where[n] for n in here]
        loads = self._loads_of(self._jobs[job], tasks, machines, demands)
        of_demand = {id(demand): demand for demand in demands}
        kinds = {each: self._kind(demand) for each, demand in of_demand.items()}
        per_byte = self._weights.move_per_gib / _GIB
        prices = {each: per_byte * demand.memory_bytes for each, demand in of_demand.items()}
        alike = list(map(id, demands))
        used_rru, used_memory, used_network = self._used
        for at, (rru, memory_bytes, mbps) in zip(where, loads, strict=True):
            used_rru[at] += rru
            used_memory[at] += memory_bytes
            used_network[at] += mbps
        for column, numbers in (
            ("index", tasks),
            ("kind", [kinds[each] for each in alike]),
            ("machine", where),
        ):
            self._columns[column].fromlist(numbers)
        self._columns["job"].fromlist([job] * len(tasks))
        self._prices.fromlist([prices[each] for each in alike])
        self._loads.fromlist(list(chain.from_iterable(loads)))
        self._can.extend(map(terms.movable, tasks) if terms is not None else bytes(len(tasks)))

    def _loads_of(
        self, job: str, tasks: list[int], machines: list[Machine], demands: list[Demand]
    ) -> list[Load]:
        """Return what tasks use: measured, else what they claim."""
        found = self._sources.measured(job, tasks)
        known = [load for load in found if load is not None]
        self._measured += len(known)
        if len(known) == len(found):
            return known
        claimed = map(claimed_load, demands, machines)
        return [load or other for load, other in zip(found, claimed, strict=True)]

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
        for at, machine in enumerate(self._machines):
            if hottest([column[at] for column in self._used], machine) > self._weights.hot_from:
                hot[self._pool_of[at]][machine.place.msb] += 1
        for pool, msbs in sorted(hot.items()):
            wanted = min(msbs.total(), self._free_left)
            for machine in self._sources.offered(self._pools[pool], msbs, wanted):
                if machine not in self._number:
                    self._add_machine(machine, pool, is_free=True)
                    self._free_left -= 1
            yield
        yield from self._offer_elsewhere()

    def _offer_elsewhere(self) -> Generator[None, None, None]:
        """List free machines as those of pools that have machines in places without power."""
        short: Counter[int] = Counter()
        for at, machine in enumerate(self._machines) if self._draws else ():
            short[self._pool_of[at]] += not self._is_free[at] and self._is_over(machine)
            if at % STEP == STEP - 1:
                yield
        for pool, number in sorted((+short).items()):
            wanted = min(number, self._free_left)
            asked = _ASKED * wanted  # some of them are in places without power
            for machine in self._sources.offered(self._pools[pool], Counter(), asked):
                if wanted > 0 and machine not in self._number and not self._is_over(machine):
                    self._add_machine(machine, pool, is_free=True)
                    self._free_left, wanted = self._free_left - 1, wanted - 1
            yield

    # -- what is made of it

    def _model(self) -> Generator[None, None, RegionModel]:
        bins, admissions = list[list[int]](), list[bytes]()
        for name in self._properties:
            bins.append((yield from self._bins(name)))
        for _, demand in self._admissions.values():
            admissions.append((yield from self._admitting(demand)))
        machines, why_short = self._machines, self._sources.indexes[0].why_short
        return RegionModel(
            weights=self._weights,
            **self._classes(),
            **self._power(),
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

    def _classes(self) -> dict[str, Any]:
        """Return the columns about exchanges of machines, and about stacks of entitlements."""
        classes: dict[object, int] = {}
        stacks: dict[object, int] = {None: -1}
        may_go, stack_of = self._sources.swappable, self._sources.stack_of
        exchanged = self._machines if may_go is not None else []
        return {
            "machine_class": [classes.setdefault(_class_of(m), len(classes)) for m in exchanged],
            "swappable": bytes(map(may_go, exchanged)) if may_go is not None else b"",
            "stack_class": [
                stacks.setdefault(stack_of(pool), len(stacks) - 1) for pool in self._pools
            ],
        }

    def _add_up_power(self) -> Generator[None, None, None]:
        """Add up what is drawn in places with budgets.

        Machines that are not in the model draw as well: free ones, and those of other pools.
        """
        sources = self._sources
        power = sources.indexes[0].power
        if power is None:
            return
        self._draws = {
            budget.place: PlaceDraw(budget.place, budget.watts) for budget in power.budgets
        }
        for count, other in enumerate(list(sources.indexes[0].machines.values())):
            machine = sources.owner(other.pool).machines.get(other.name) or other
            at = self._number.get(machine)
            rru = self._used[0][at] if at is not None else claimed_rru(machine)
            watts, _ = sources.drawn(machine, rru)
            moving = watts_per_rru(machine.capacity) * rru if at is not None else 0.0
            for budget in power.budgets_of(machine.place) if machine.blocked != DOWN else ():
                self._draws[budget.place].add(machine, watts, moving, sources.capped(machine))
            if count % STEP == STEP - 1:
                yield

    def _places_of(self, machine: Machine) -> list[str]:
        power = self._sources.indexes[0].power
        return [b.place for b in power.budgets_of(machine.place)] if power is not None else []

    def _is_over(self, machine: Machine) -> bool:
        """Return whether a place of a machine draws more than it bears."""
        share = self._sources.limit_share
        return any(self._draws[name].is_over(share) for name in self._places_of(machine))

    def _power(self) -> dict[str, Any]:
        """Return the columns about places with budgets, and what load draws there."""
        if not self._draws:
            return {}
        number = {name: at for at, name in enumerate(self._draws)}
        of = [[number[name] for name in self._places_of(m)] for m in self._machines]
        levels = max(map(len, of), default=0)
        share = self._sources.limit_share
        return {
            "places": [draw.place(share) for draw in self._draws.values()],
            "places_of": [[e[n] if n < len(e) else -1 for e in of] for n in range(levels)],
            "watts_per_rru": [watts_per_rru(m.capacity) for m in self._machines],
        }

    def _admitting(self, demand: Demand) -> Generator[None, None, bytes]:
        mask = bytearray()
        for number, machine in enumerate(self._machines):
            mask.append(admits(demand, machine))
            if number % STEP == STEP - 1:
                yield
        return bytes(mask)

    def _bins(self, name: str) -> Generator[None, None, list[int]]:
        numbers: dict[str, int] = {}
        found = []
        for number, machine in enumerate(self._machines):
            found.append(numbers.setdefault(bin_of(name, machine), len(numbers)))
            if number % STEP == STEP - 1:
                yield
        return found


def _class_of(machine: Machine) -> tuple[object, ...]:
    """Return what machines have in common that offer nearly the same: 5 % of memory is no other."""
    capacity = machine.capacity
    memory = round(log(max(1, capacity.memory_bytes)) / 0.05)
    kind = capacity.machine_type, capacity.sku, capacity.gpu_type, capacity.gpus
    return (*kind, round(capacity.rru, 2), round(capacity.cpus, 2), memory)


def _room(machine: Machine) -> tuple[int, int, int, int, int]:
    gpus = int(machine.free_gpus * _MICRO_GPUS)
    rest = (machine.free_network, machine.free_disk, machine.free_ports)
    return (machine.free_memory, gpus, *rest)
