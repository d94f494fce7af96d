"""Builds the solver's model from the allocator's index and the jobs' records, in short steps.

Rooms, requirements and rules are the allocator's own. Free room comes from its index,
`feasibility.admits` decides where a task may run, and the preferences of a job say how it is
spread. Only entitlements with machines take part. Free machines are offered to entitlements with
hot machines.
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
    PowerOfPlace,
    claimed_load,
    claimed_rru,
    largest_share,
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
"""Reason for which the allocator blocks a machine that is down. Such a machine draws no power."""
_OFFERS_PER_WANTED = 4
"""Free machines that are requested for each wanted one, since some are in places without power."""
_MICRO_GPUS = 1_000_000
_GIB = 1 << 30
Measured = Callable[[str, Sequence[int]], list[Load | None]]
"""Returns the load of each given task of a job; None: not measured."""


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What the survey needs of a job in addition to its claims."""

    preferences: Sequence[Preference]
    movable: Callable[[int], bool]
    """Whether this task may move now."""


@dataclass(frozen=True, slots=True)
class SurveySources:
    """The functions and data that the survey reads."""

    indexes: Sequence[RegionIndex]
    """One index for each shard: all machines, and the claims of the shard's own jobs."""
    owner: Callable[[str], RegionIndex]
    """Returns the index with the claims in a pool."""
    terms: Callable[[str], JobTerms | None]
    """Returns the terms of a job; None: none of its tasks may move."""
    measured: Measured
    offered: Callable[[str, Mapping[str, int], int], Sequence[Machine]]
    """Returns free machines that a pool may take, for its hot machines by MSB and a maximum."""
    watts: Callable[[Machine, float], tuple[float, bool]]
    """Returns the power draw at a CPU use in RRU, and whether the host measured it."""
    capped: Callable[[Machine], bool]
    """Returns whether the power of a machine is capped now."""
    swappable: Callable[[Machine], bool] | None
    """Returns whether a machine may be exchanged; None: no machine may."""
    stack_of: Callable[[str], object] = lambda _pool: None
    """Returns a key, equal for pools that could share machines; None: the pool may share none."""
    limit_share: float = 0.95
    """Share of a power budget above which power costs."""


class Survey:
    """Collects a model; one object for one model."""

    def __init__(
        self,
        sources: SurveySources,
        weights: Weights,
        free_machines: int,
        only: Collection[str] | None = None,
    ) -> None:
        """`only`: the pools to survey; None: all. A plan for some pools does not touch others."""
        self._sources, self._weights, self._only = sources, weights, only
        self._free_left = free_machines
        self._machines: list[Machine] = []
        self._number: dict[Machine, int] = {}
        self._pool_of: list[int] = []
        self._pools: list[str] = []
        self._is_free: list[bool] = []
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kinds_in_order: list[TaskKind] = []
        self._admissions: dict[tuple[object, ...], tuple[int, Demand]] = {}
        self._properties: dict[str, int] = {Property.MSB: 0}
        self._rules: list[list[BinRule]] = []
        self._jobs: list[str] = []
        self._columns = {name: array("i") for name in ("job", "index", "kind", "machine")}
        self._loads: array[float] = array("d")
        self._prices: array[float] = array("d")
        self._can_move = bytearray()
        self._used = [array("d") for _ in DIMENSIONS]
        """By dimension: use of each machine."""
        self._measured = 0
        self._power_of: dict[str, PowerOfPlace] = {}
        """Place with a power budget → its power."""

    def run(self) -> Generator[None, None, RegionModel]:
        """Collect the model. Other coroutines may run at each `yield`."""
        sources, indexes = self._sources, self._sources.indexes
        for name in sorted({pool for index in indexes for pool in index.pools} - {FREE}):
            if self._only is None or name in self._only:
                yield from self._add_pool(name, list(sources.owner(name).pool(name).machines()))
        of_job = {job: index for index in indexes for job in index.claims}
        for job in sorted(of_job):
            claims = of_job[job].claims.get(job)
            if claims is not None and (self._only is None or claims.pool in self._only):
                yield from self._add_job(job, claims)
        yield from self._sum_power()
        yield from self._offer()
        return (yield from self._model())

    # -- machines, jobs and tasks

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
        """Add tasks of one job to the columns, many at once: a job may have a million tasks."""
        where = [self._number.get(machine, -1) for machine in machines]
        if -1 in where:
            known = [n for n, at in enumerate(where) if at >= 0]
            tasks, machines = [tasks[n] for n in known], [machines[n] for n in known]
            demands, where = [demands[n] for n in known], [where[n] for n in known]
        loads = self._loads_of(self._jobs[job], tasks, machines, demands)
        demand_ids = list(map(id, demands))
        by_id = dict(zip(demand_ids, demands, strict=True))
        kinds = {key: self._kind(demand) for key, demand in by_id.items()}
        per_byte = self._weights.move_per_gib / _GIB
        prices = {key: per_byte * demand.memory_bytes for key, demand in by_id.items()}
        used_rru, used_memory, used_network = self._used
        for at, (rru, memory_bytes, mbps) in zip(where, loads, strict=True):
            used_rru[at] += rru
            used_memory[at] += memory_bytes
            used_network[at] += mbps
        for column, numbers in (
            ("index", tasks),
            ("kind", [kinds[key] for key in demand_ids]),
            ("machine", where),
        ):
            self._columns[column].fromlist(numbers)
        self._columns["job"].fromlist([job] * len(tasks))
        self._prices.fromlist([prices[key] for key in demand_ids])
        self._loads.fromlist(list(chain.from_iterable(loads)))
        self._can_move.extend(map(terms.movable, tasks) if terms is not None else bytes(len(tasks)))

    def _loads_of(
        self, job: str, tasks: list[int], machines: list[Machine], demands: list[Demand]
    ) -> list[Load]:
        """Return the load of each task: the measured one, else what the task claims."""
        loads = self._sources.measured(job, tasks)
        measured = [load for load in loads if load is not None]
        self._measured += len(measured)
        if len(measured) == len(loads):
            return measured
        claimed = map(claimed_load, demands, machines)
        return [load or claim for load, claim in zip(loads, claimed, strict=True)]

    def _kind(self, demand: Demand) -> int:
        """Return the number of a demand's kind; adds the kind if it is new."""
        key = demand.size
        number = self._kinds.get(key)
        if number is None:
            admission, _ = self._admissions.setdefault(
                tuple(demand.requires), (len(self._admissions), demand)
            )
            gpus = -int(-demand.gpus * _MICRO_GPUS // 1)
            needs = (demand.memory_bytes, gpus, demand.network_mbps, demand.disk_bytes)
            number = self._kinds[key] = len(self._kinds_in_order)
            self._kinds_in_order.append(
                TaskKind(
                    demand.micro_rru, demand.micro_cpus, (*needs, len(demand.ports)), admission
                )
            )
        return number

    def _rule(self, preference: Preference) -> BinRule:
        """Return the rule of a preference; all but a plain `even` keep tasks in their bins."""
        number = -1
        if preference.property != Property.MACHINE:
            number = self._properties.setdefault(preference.property, len(self._properties))
        even = preference.strategy is Strategy.EVEN and not preference.weights
        return BinRule(number, even, preference.at_most or 0)

    def _offer(self) -> Generator[None, None, None]:
        """Add free machines to pools that have hot machines."""
        hot: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for at, machine in enumerate(self._machines):
            if (
                largest_share([column[at] for column in self._used], machine)
                > self._weights.hot_from
            ):
                hot[self._pool_of[at]][machine.place.msb] += 1
        for pool, msbs in sorted(hot.items()):
            wanted = min(msbs.total(), self._free_left)
            for machine in self._sources.offered(self._pools[pool], msbs, wanted):
                if machine not in self._number:
                    self._add_machine(machine, pool, is_free=True)
                    self._free_left -= 1
            yield
        yield from self._offer_for_power()

    def _offer_for_power(self) -> Generator[None, None, None]:
        """Add free machines to pools that have machines in places above their power budget."""
        short: Counter[int] = Counter()
        for at, machine in enumerate(self._machines) if self._power_of else ():
            short[self._pool_of[at]] += not self._is_free[at] and self._is_over(machine)
            if at % STEP == STEP - 1:
                yield
        for pool, number in sorted((+short).items()):
            wanted = min(number, self._free_left)
            most = _OFFERS_PER_WANTED * wanted
            for machine in self._sources.offered(self._pools[pool], Counter(), most):
                if wanted > 0 and machine not in self._number and not self._is_over(machine):
                    self._add_machine(machine, pool, is_free=True)
                    self._free_left, wanted = self._free_left - 1, wanted - 1
            yield

    # -- the model

    def _model(self) -> Generator[None, None, RegionModel]:
        bins, admissions = list[list[int]](), list[bytes]()
        for name in self._properties:
            bins.append((yield from self._bins(name)))
        for _, demand in self._admissions.values():
            admissions.append((yield from self._admission_mask(demand)))
        machines, why_short = self._machines, self._sources.indexes[0].why_short
        return RegionModel(
            weights=self._weights,
            **self._classes(),
            **self._power_columns(),
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
            kinds=self._kinds_in_order,
            tasks=TaskColumns(
                **{name: column.tobytes() for name, column in self._columns.items()},
                load=self._loads.tobytes(),
                price=self._prices.tobytes(),
                can_move=bytes(self._can_move),
            ),
            measured=self._measured,
        )

    def _classes(self) -> dict[str, Any]:
        """Return the columns for exchanges of machines and for stacks of entitlements."""
        classes: dict[object, int] = {}
        stacks: dict[object, int] = {None: -1}
        swappable, stack_of = self._sources.swappable, self._sources.stack_of
        exchanged = self._machines if swappable is not None else []
        return {
            "machine_class": [
                classes.setdefault(_machine_class(m), len(classes)) for m in exchanged
            ],
            "swappable": bytes(map(swappable, exchanged)) if swappable is not None else b"",
            "stack_class": [
                stacks.setdefault(stack_of(pool), len(stacks) - 1) for pool in self._pools
            ],
        }

    def _sum_power(self) -> Generator[None, None, None]:
        """Add up the power of places with budgets.

        Free machines, and machines of pools that are not in the model, draw power too.
        """
        sources = self._sources
        power = sources.indexes[0].power
        if power is None:
            return
        self._power_of = {
            budget.place: PowerOfPlace(budget.place, budget.watts) for budget in power.budgets
        }
        for count, other in enumerate(list(sources.indexes[0].machines.values())):
            machine = sources.owner(other.pool).machines.get(other.name) or other
            at = self._number.get(machine)
            rru = self._used[0][at] if at is not None else claimed_rru(machine)
            watts, _ = sources.watts(machine, rru)
            moving = watts_per_rru(machine.capacity) * rru if at is not None else 0.0
            for budget in power.budgets_of(machine.place) if machine.blocked != DOWN else ():
                self._power_of[budget.place].add(machine, watts, moving, sources.capped(machine))
            if count % STEP == STEP - 1:
                yield

    def _places_of(self, machine: Machine) -> list[str]:
        power = self._sources.indexes[0].power
        return [b.place for b in power.budgets_of(machine.place)] if power is not None else []

    def _is_over(self, machine: Machine) -> bool:
        """Return whether a machine is in a place that draws more power than its limit."""
        share = self._sources.limit_share
        return any(self._power_of[name].is_over(share) for name in self._places_of(machine))

    def _power_columns(self) -> dict[str, Any]:
        """Return the columns for places with power budgets."""
        if not self._power_of:
            return {}
        number = {name: at for at, name in enumerate(self._power_of)}
        places = [[number[name] for name in self._places_of(m)] for m in self._machines]
        levels = max(map(len, places), default=0)
        share = self._sources.limit_share
        return {
            "places": [power.place(share) for power in self._power_of.values()],
            "places_of": [[p[n] if n < len(p) else -1 for p in places] for n in range(levels)],
            "watts_per_rru": [watts_per_rru(m.capacity) for m in self._machines],
        }

    def _admission_mask(self, demand: Demand) -> Generator[None, None, bytes]:
        """Return one byte per machine: 1 where tasks with this demand may run."""
        mask = bytearray()
        for number, machine in enumerate(self._machines):
            mask.append(admits(demand, machine))
            if number % STEP == STEP - 1:
                yield
        return bytes(mask)

    def _bins(self, name: str) -> Generator[None, None, list[int]]:
        """Return the number of each machine's bin by a property."""
        numbers: dict[str, int] = {}
        bins = []
        for number, machine in enumerate(self._machines):
            bins.append(numbers.setdefault(bin_of(name, machine), len(numbers)))
            if number % STEP == STEP - 1:
                yield
        return bins


def _machine_class(machine: Machine) -> tuple[object, ...]:
    """Return a key that is equal for machines that offer nearly the same (5 % of memory)."""
    capacity = machine.capacity
    memory = round(log(max(1, capacity.memory_bytes)) / 0.05)
    kind = capacity.machine_type, capacity.sku, capacity.gpu_type, capacity.gpus
    return (*kind, round(capacity.rru, 2), round(capacity.cpus, 2), memory)


def _room(machine: Machine) -> tuple[int, int, int, int, int]:
    gpus = int(machine.free_gpus * _MICRO_GPUS)
    rest = (machine.free_network, machine.free_disk, machine.free_ports)
    return (machine.free_memory, gpus, *rest)
