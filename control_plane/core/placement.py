"""Tasks to machines: who fits where, and which of the fitting machines to choose.

`fits` is the only judge of feasibility: the planner, the check at the commit, the growth of
an entitlement and the explanation to the owner all ask it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.api import Location, MachineFacts
from control_plane.api.jobs import JobSpec, Placement

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports of tasks: below the kernel's ephemeral range (32768-60999, ip-sysctl.rst)."""
_RESERVE_MIN_BYTES = 128 << 20
_RESERVE_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task of a job needs of a machine."""

    memory_bytes: int
    cpu_cores: float = 0.0
    ports: tuple[str, ...] = ()
    machine_types: tuple[str, ...] = ()
    """Empty: any."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the tasks placed on a machine may use together."""

    memory_bytes: int = 0
    cpu_cores: float = 0.0
    ports: frozenset[int] = frozenset()

    def plus(self, demand: Demand, ports: Iterable[int]) -> Load:
        """Return the load with one more task."""
        return Load(
            self.memory_bytes + demand.memory_bytes,
            self.cpu_cores + demand.cpu_cores,
            self.ports.union(ports),
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as placement sees it."""

    name: str
    location: Location
    machine_type: str
    memory_bytes: int
    """Usable by tasks."""
    cpu_cores: float
    load: Load = Load()
    blocked: str = ""
    """Why it cannot take tasks now, as a predicate: "is down"."""
    next_port: int = FIRST_PORT
    """Where the search for free ports begins; moves on, so that a port that was just given
    up is not reused at once while clients may still remember it."""

    @property
    def msb(self) -> tuple[str, str]:
        """Data center and MSB: the fault domain over which tasks are spread."""
        return (self.location.datacenter, self.location.msb)


class Kind(StrEnum):
    """Kinds of reasons why a machine cannot take a task."""

    TYPE = "type"
    BLOCKED = "blocked"
    MEMORY = "memory"
    CPU = "cpu"
    PORTS = "ports"


@dataclass(frozen=True, slots=True)
class Misfit:
    """One reason why one machine cannot take a task."""

    kind: Kind
    what: str = ""
    free: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where tasks go, and why the rest goes nowhere."""

    placements: dict[int, Placement] = field(default_factory=dict)
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


def usable_memory(facts: MachineFacts | None) -> int:
    """Return what tasks may use: all but 10 %, at least 128 MiB, for kernel and agent."""
    if facts is None:
        return 0
    reserve = max(_RESERVE_MIN_BYTES, int(facts.memory_bytes * _RESERVE_SHARE))
    return max(0, facts.memory_bytes - reserve)


def demand_of(spec: JobSpec) -> Demand:
    """Return what one task of a job needs; memory and CPU are never overcommitted (AL21)."""
    return Demand(
        memory_bytes=spec.limits.memory_max_bytes,
        cpu_cores=spec.limits.cpu_max_cores or 0.0,
        ports=tuple(spec.ports),
        machine_types=tuple(spec.machine_types),
    )


def fits(demand: Demand, host: Host) -> tuple[Misfit, ...]:
    """Return every reason why the machine cannot take one more such task; empty: it can."""
    found = []
    if demand.machine_types and host.machine_type not in demand.machine_types:
        found.append(Misfit(Kind.TYPE))
    if host.blocked:
        found.append(Misfit(Kind.BLOCKED, host.blocked))
    free_memory = host.memory_bytes - host.load.memory_bytes
    if demand.memory_bytes > free_memory:
        found.append(Misfit(Kind.MEMORY, free=free_memory))
    free_cpu = host.cpu_cores - host.load.cpu_cores
    if demand.cpu_cores > free_cpu + 1e-9:
        found.append(Misfit(Kind.CPU, free=free_cpu))
    if len(demand.ports) > LAST_PORT + 1 - FIRST_PORT - len(host.load.ports):
        found.append(Misfit(Kind.PORTS))
    return tuple(found)


def room(demand: Demand, host: Host, most: int) -> int:
    """Return how many such tasks fit at once, counting no further than `most`."""
    count = 0
    while count < most and not fits(demand, host):
        ports = _free_ports(demand, host)
        host = replace(host, load=host.load.plus(demand, ports.values()))
        count += 1
    return count


def place(
    demand: Demand, indexes: Sequence[int], hosts: Sequence[Host], mine: Mapping[str, int]
) -> Plan:
    """Return machines for tasks of one job, spread evenly over MSBs (AL8).

    `mine` counts the job's tasks that stay, per machine. Each task goes to the MSB that
    holds the fewest of the job's tasks and has room (between equals: to the data center
    with the fewest), there to the machine with the fewest, then to the least loaded one.
    Since every task takes an emptiest MSB, the counts of MSBs with room never differ by
    more than one unless they did before.
    """
    shelves = _Shelves(demand, hosts, mine)
    placements: dict[int, Placement] = {}
    for position, index in enumerate(indexes):
        placement = shelves.take()
        if placement is None:
            reasons = explain(demand, shelves.after())
            return Plan(placements, tuple(indexes[position:]), reasons)
        placements[index] = placement
    return Plan(placements)


def explain(demand: Demand, hosts: Sequence[Host]) -> tuple[str, ...]:
    """Return why no machine takes the task, per group of machines, largest group first."""
    if not hosts:
        return ("the entitlement holds no machine yet",)
    groups: Counter[str] = Counter()
    most: dict[Kind, float] = {}
    for host in hosts:
        for misfit in fits(demand, host):
            most[misfit.kind] = max(most.get(misfit.kind, 0.0), misfit.free)
            groups[misfit.what if misfit.kind is Kind.BLOCKED else misfit.kind] += 1
    words = {
        Kind.TYPE: f"not of type {' or '.join(demand.machine_types)}",
        Kind.MEMORY: f"memory: {_mib(demand.memory_bytes)} wanted,"
        f" at most {_mib(most.get(Kind.MEMORY, 0))} free",
        Kind.CPU: f"CPU: {demand.cpu_cores:g} cores wanted, at most {most.get(Kind.CPU, 0):g} free",
        Kind.PORTS: "no free ports",
    }
    return tuple(
        f"{count} machine{'s' if count > 1 else ''}: {words.get(Kind(g), g) if g in _KINDS else g}"
        for g, count in groups.most_common()
    )


_KINDS = frozenset(str(kind) for kind in Kind)


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.0f} MiB"


def _free_ports(demand: Demand, host: Host) -> dict[str, int]:
    """Return a free port per name, from `next_port` on and round; `fits` said there are."""
    ports: dict[str, int] = {}
    port = host.next_port
    for name in demand.ports:
        while port in host.load.ports or port in ports.values() or port > LAST_PORT:
            port = FIRST_PORT if port >= LAST_PORT else port + 1
        ports[name] = port
    return ports


class _Shelves:
    """Machines by MSB, the best one of each on top, while one plan is made.

    All tasks of a plan are alike, so a machine that cannot take one is dropped for good and
    a plan costs O(machines + tasks · log machines).
    """

    def __init__(self, demand: Demand, hosts: Sequence[Host], mine: Mapping[str, int]) -> None:
        self._demand = demand
        self._hosts = {host.name: host for host in hosts}
        self._mine = dict(mine)
        self._heaps: dict[tuple[str, str], list[tuple[int, float, str]]] = {}
        self._in_msb: Counter[tuple[str, str]] = Counter()
        self._in_datacenter: Counter[str] = Counter()
        for host in hosts:
            self._count(host, self._mine.get(host.name, 0))
            if not fits(demand, host):
                self._heaps.setdefault(host.msb, []).append(self._rank(host))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def take(self) -> Placement | None:
        """Return the best place for one more task, or None."""
        if not self._heaps:
            return None
        msb = min(self._heaps, key=lambda m: (self._in_msb[m], self._in_datacenter[m[0]], m))
        heap = self._heaps[msb]
        host = self._hosts[heapq.heappop(heap)[2]]
        ports = _free_ports(self._demand, host)
        self._mine[host.name] = self._mine.get(host.name, 0) + 1
        self._count(host, 1)
        host = replace(
            host,
            load=host.load.plus(self._demand, ports.values()),
            next_port=max(ports.values(), default=host.next_port - 1) + 1,
        )
        self._hosts[host.name] = host
        if not fits(self._demand, host):
            heapq.heappush(heap, self._rank(host))
        elif not heap:
            del self._heaps[msb]
        return Placement(machine=host.name, ports=ports)

    def after(self) -> list[Host]:
        """Return all machines with what was placed on them."""
        return list(self._hosts.values())

    def _count(self, host: Host, tasks: int) -> None:
        self._in_msb[host.msb] += tasks
        self._in_datacenter[host.location.datacenter] += tasks

    def _rank(self, host: Host) -> tuple[int, float, str]:
        share = host.load.memory_bytes / max(1, host.memory_bytes)
        return (self._mine.get(host.name, 0), share, host.name)
