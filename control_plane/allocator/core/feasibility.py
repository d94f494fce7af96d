"""Judges whether a machine can take a task, and describes why not.

The planner, the check at the commit, the check of a new job and `twinectl job explain` all call
`judge`, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from math import ceil, floor
from typing import Protocol

from control_plane.allocator.core.demand import Demand
from control_plane.api.policy import Property
from control_plane.api.requirements import NUMBERS, Maybe, Not, Term, properties_of, text_of
from control_plane.broker.core.capacity import MICRO, Capacity
from control_plane.broker.core.matching import Subject, holds, may_hold
from control_plane.broker.core.matching import bin_of as bin_of
from control_plane.broker.core.matching import names as names

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Ports of tasks: below the kernel's ephemeral range (32768-60999, ip-sysctl.rst)."""
PORTS = LAST_PORT + 1 - FIRST_PORT
_MIB = 1 << 20


class Lack(IntEnum):
    """A reason why a machine cannot take a task; several at once are added as bits."""

    NOTHING = 0
    EXCLUDED = 1
    """A hard requirement of the job is not met."""
    BLOCKED = 2
    """The machine takes no tasks now."""
    MEMORY = 4
    CPU = 8
    GPUS = 16
    NETWORK = 32
    PORTS = 64
    DISK = 128


class Room(Protocol):
    """The free room on a machine."""

    free_cpu: int
    """In grains of the machine's capacity."""
    free_memory: int
    free_gpus: float
    free_network: int
    free_disk: int

    @property
    def free_ports(self) -> int:
        """How many ports no task has."""
        ...


def take_room(room: Room, demand: Demand, capacity: Capacity, times: int = 1) -> None:
    """Subtract the room of tasks; a negative `times` adds it. Ports are not included."""
    room.free_cpu -= demand.cpu_on(capacity) * times
    room.free_memory -= demand.memory_bytes * times
    room.free_gpus -= demand.gpus * times
    room.free_network -= demand.network_mbps * times
    room.free_disk -= demand.disk_bytes * times


class Candidate(Subject, Protocol):
    """The properties of a machine that `judge` reads."""

    @property
    def blocked(self) -> str:
        """Why it takes no tasks now, as a predicate ("is down"); empty if it takes tasks."""
        ...


def judge(demand: Demand, machine: Candidate, room: Room) -> int:
    """Return every `Lack` that keeps the machine from taking one more such task; 0 if none.

    `room` is the free room there: the machine itself, or a copy with the changes of a plan.
    """
    lacks = 0
    if demand.requires and not admits(demand, machine):
        lacks |= Lack.EXCLUDED
    if machine.blocked:
        lacks |= Lack.BLOCKED
    if demand.memory_bytes > room.free_memory:
        lacks |= Lack.MEMORY
    capacity = machine.capacity
    cpu = demand.micro_rru * capacity.per_rru + demand.micro_cpus * capacity.per_cpu
    if cpu > room.free_cpu:
        lacks |= Lack.CPU
    if demand.gpus > room.free_gpus:
        lacks |= Lack.GPUS
    if demand.network_mbps > room.free_network:
        lacks |= Lack.NETWORK
    if demand.ports and len(demand.ports) > room.free_ports:
        lacks |= Lack.PORTS
    if demand.disk_bytes > room.free_disk:
        lacks |= Lack.DISK
    return lacks


SHARED = frozenset(Property) - {Property.ROW, Property.RACK, Property.MACHINE}
"""Properties that all machines of one type in one MSB have in common."""
OF_BUCKETS = SHARED | {"rru", "cpus", "gpus", "network_mbps", "power_w"}
"""Properties that all machines of one bucket have in common."""
_OF_KINDS = frozenset({*SHARED, *NUMBERS})
"""Properties that a kind of machine determines: not row, rack, name, labels and capabilities."""


def is_large_enough(demand: Demand, capacity: Capacity) -> bool:
    """Return whether an empty machine like this has room for such a task."""
    return (
        demand.memory_bytes <= capacity.memory_bytes
        and demand.cpu_on(capacity) <= capacity.cpu_room
        and demand.gpus <= capacity.gpus
        and demand.network_mbps <= capacity.network_mbps
        and demand.disk_bytes <= capacity.disk_bytes
    )


def admits(demand: Demand, machine: Candidate) -> bool:
    """Return whether a machine meets the hard requirements."""
    return all(holds(term, machine) for term in demand.requires)


def admits_any_of(demand: Demand, bucket: Candidate) -> bool:
    """Return whether machines of a bucket can meet the hard requirements."""
    return all(may_hold(term, bucket, OF_BUCKETS) for term in demand.requires)


def fits_each(demand: Demand, bucket: Candidate) -> bool:
    """Return whether every machine of a bucket surely takes such a task if it is empty."""
    return is_large_enough(demand, bucket.capacity) and not any(
        may_hold(Not(term), bucket, OF_BUCKETS) for term in demand.requires
    )


def kind_demand(demand: Demand) -> Demand:
    """Return a demand without requirements that only single machines determine."""
    return restricted_to(demand, _OF_KINDS)


def restricted_to(demand: Demand, known: frozenset[str]) -> Demand:
    """Return a demand without the requirements that these properties cannot exclude."""
    requires: list[Term] = []
    for term in demand.requires:
        asked = properties_of(term)
        if asked <= known:
            requires.append(term)
        elif asked & known:
            requires.append(Maybe(term, known))
    made = tuple(requires)
    return demand if made == demand.requires else replace(demand, requires=made)


class Tally:
    """Counts why machines cannot take a task, so that its owner gets all reasons at once."""

    def __init__(self, demand: Demand) -> None:
        self.machines = 0
        self.fitting = 0
        self._demand = demand
        self._counts: dict[str, int] = {}
        self._most: dict[str, float] = {}

    def add(self, machine: Candidate, room: Room, short: str = "") -> int:
        """Judge one machine and return its lacks; each lack is counted.

        `short` describes the lack of power in its rack, row, MSB or data center, if any.
        """
        self.machines += 1
        lacks = judge(self._demand, machine, room)
        if short:
            self._note(short, 0.0)
        if not lacks:
            self.fitting += not short
            return 0
        if lacks & Lack.EXCLUDED:
            self._note("excluded", 0.0)
        if lacks & Lack.BLOCKED:
            self._note(machine.blocked, 0.0)
        for key, free in self._lacking(lacks, machine, room):
            self._note(key, free)
        return lacks

    def compare(self, machine: Candidate, room: Room) -> None:
        """Include a machine that is not counted in the maximum that reasons mention."""
        for key, free in self._lacking(judge(self._demand, machine, room), machine, room):
            self._most[key] = max(free, self._most.get(key, 0.0))

    def _lacking(self, lacks: int, machine: Candidate, room: Room) -> Iterator[tuple[str, float]]:
        """Yield the resources that a machine lacks, and the free amount of each."""
        if lacks & Lack.MEMORY:
            yield "memory", room.free_memory
        if lacks & Lack.CPU:
            free = machine.capacity.rru_of if self._demand.rru else machine.capacity.cpus_of
            yield "cpu", free(room.free_cpu)
        if lacks & Lack.GPUS:
            yield "gpus", room.free_gpus
        if lacks & Lack.NETWORK:
            yield "network", room.free_network
        if lacks & Lack.PORTS:
            yield "ports", 0.0
        if lacks & Lack.DISK:
            yield "disk", room.free_disk

    def _note(self, key: str, free: float) -> None:
        self._counts[key] = self._counts.get(key, 0) + 1
        if free > self._most.get(key, 0.0):
            self._most[key] = free

    def reasons(self) -> tuple[str, ...]:
        """Return one line per reason, the most frequent first."""
        words = self._words()
        return tuple(
            f"{count} machine{'s' if count > 1 else ''}: {words.get(key, key)}"
            for key, count in sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
        )

    def overlap(self, others: int = 0) -> list[str]:
        """Return a note if machines have several reasons; `others` is a count of other reasons."""
        if others + sum(self._counts.values()) <= self.machines:
            return []
        s = "s" if self.machines > 1 else ""
        return [f"of {self.machines} machine{s} in all: each counts once per reason"]

    def lacks(self) -> frozenset[str]:
        """Return the kinds of reasons that occurred: `memory`, `cpu`, …"""
        return frozenset(self._counts)

    def _words(self) -> Mapping[str, str]:
        demand, most = self._demand, self._most
        wanted = "; ".join(map(text_of, demand.requires))
        unit = "RRU" if demand.rru else "cores"
        return {
            "excluded": f"requirement not met: {wanted}",
            "memory": f"memory: {_wanted_mib(demand.memory_bytes)} wanted,"
            f" at most {_free_mib(most.get('memory', 0))} free",
            "cpu": f"CPU: {_number(demand.rru or demand.cpus)} {unit} wanted,"
            f" at most {_number(most.get('cpu', 0))} {unit} free",
            "gpus": f"GPUs: {demand.gpus:g} wanted, at most {most.get('gpus', 0):g} free",
            "network": f"network: {demand.network_mbps} Mbit/s wanted,"
            f" at most {most.get('network', 0):g} free",
            "ports": "no free ports",
            "disk": f"disk: {_wanted_mib(demand.disk_bytes)} wanted,"
            f" at most {_free_mib(most.get('disk', 0))} free",
        }


def _number(amount: float) -> str:
    """Return cores or RRU as text, rounded down to millionths, in which they are counted."""
    return f"{floor(amount * MICRO + 1e-3) / MICRO:.6f}".rstrip("0").rstrip(".")


def _wanted_mib(size_bytes: float) -> str:
    """Return a size as text, rounded up: above every free amount that does not suffice."""
    return f"{ceil(size_bytes / _MIB)} MiB"


def _free_mib(size_bytes: float) -> str:
    """Return a size as text, rounded down."""
    return f"{floor(size_bytes / _MIB)} MiB"
