"""Capacities and places of machines; equal machines share one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from agent.api import Location
from control_plane.api.machines import Hardware, MachineRecord

_RESERVE_MIN_BYTES = 128 << 20
_RESERVE_SHARE = 0.10
_SWEEP = 1_000
"""With more known capacities or places than this, unused ones are searched and dropped."""
T = TypeVar("T")
MICRO = 1_000_000
"""CPUs and relative resource units are counted as whole millionths, so that sums are exact."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Capacity:
    """What machines of one kind offer to tasks; one object is shared by all equal machines."""

    machine_type: str
    rru: float
    cpus: float
    memory_bytes: int
    """Usable by tasks."""
    gpus: int = 0
    network_mbps: int = 0
    disk_bytes: int = 0
    """Usable by tasks."""
    generation: str = ""
    sku: str = ""
    gpu_type: str = ""
    power_w: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    """Labels set by operators, sorted by name."""
    capabilities: frozenset[str] = frozenset()
    """Capabilities that its agent reports; none before it has joined."""
    cpu_room: int = field(init=False, compare=False, repr=False)
    """All of its CPU in grains. A millionth of a core and a millionth of an RRU are both whole
    numbers of grains, so sums are never rounded."""
    per_rru: int = field(init=False, compare=False, repr=False)
    """Grains in a millionth of an RRU."""
    per_cpu: int = field(init=False, compare=False, repr=False)
    """Grains in a millionth of a core."""

    def __post_init__(self) -> None:
        """Choose the grain."""
        rru, cpus = micro(self.rru), micro(self.cpus)
        common = gcd(rru, cpus) if rru and cpus else 0
        per_rru, per_cpu = (cpus // common, rru // common) if common else (1, 1)
        object.__setattr__(self, "cpu_room", rru * per_rru)
        object.__setattr__(self, "per_rru", per_rru)
        object.__setattr__(self, "per_cpu", per_cpu)

    def rru_of(self, grains: int) -> float:
        """Return grains as relative resource units."""
        return grains / (self.per_rru * MICRO)

    def cpus_of(self, grains: int) -> float:
        """Return grains as cores."""
        return grains / (self.per_cpu * MICRO)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Place:
    """Where a machine is, with each level as a path that is unique in the region."""

    region: str
    datacenter: str
    msb: str
    """`datacenter/msb`."""
    row: str
    rack: str

    @staticmethod
    def of(location: Location) -> Place:
        """Return the place of a location."""
        msb = f"{location.datacenter}/{location.msb}"
        row = f"{msb}/{location.row}"
        rack = f"{row}/{location.rack}"
        return Place(location.region, location.datacenter, msb, row, rack)


def micro(number: float) -> int:
    """Return cores or RRU as whole millionths."""
    return round(number * MICRO)


def usable_memory(memory_bytes: int) -> int:
    """Return the memory for tasks: kernel and agent keep 10 %, and at least 128 MiB."""
    return max(0, memory_bytes - max(_RESERVE_MIN_BYTES, int(memory_bytes * _RESERVE_SHARE)))


def usable_disk(disk_bytes: int) -> int:
    """Return the disk space for tasks: a fifth is kept for images and shared data."""
    return disk_bytes - disk_bytes // 5


def size_of(record: MachineRecord) -> tuple[float, int, int]:
    """Return a machine's RRU, the bytes of memory that tasks may use, and its watts."""
    hardware, facts = record.hardware, record.facts
    memory = facts.memory_bytes if facts else hardware.memory_bytes if hardware else 0
    # huge pages are for programs that request them; they do not count for memory limits
    taken = facts.hugepages_bytes if facts else 0
    cpus = facts.cpus if facts else hardware.cpus if hardware else 0
    rru = hardware.rru if hardware and hardware.rru else float(cpus)
    power_w = hardware.power_w if hardware else 0
    return rru, max(0, usable_memory(memory) - taken), power_w


def capacity_of(record: MachineRecord) -> Capacity:
    """Return the capacity of a machine as its agent reports it, else as the inventory lists it.

    A machine whose RRU are unknown has one RRU per CPU.
    """
    hardware, facts = record.hardware, record.facts
    rru, memory_bytes, power_w = size_of(record)
    disk = facts.disk_bytes if facts else hardware.disk_bytes if hardware else 0
    return Capacity(
        machine_type=record.machine_type,
        rru=rru,
        cpus=facts.cpus if facts else hardware.cpus if hardware else 0,
        memory_bytes=memory_bytes,
        gpus=hardware.gpus if hardware else 0,
        network_mbps=hardware.network_mbps if hardware else 0,
        disk_bytes=usable_disk(disk),
        generation=hardware.generation if hardware else "",
        sku=hardware.sku if hardware else "",
        gpu_type=hardware.gpu_type if hardware else "",
        power_w=power_w,
        labels=labels_of(record),
        capabilities=frozenset(facts.capabilities) if facts else frozenset(),
    )


def labels_of(record: MachineRecord) -> tuple[tuple[str, str], ...]:
    """Return the labels of a machine, sorted by name."""
    return tuple(sorted(record.labels.items())) if record.labels else ()


class Kinds:
    """Shares one capacity or place among all equal machines, while any machine has it."""

    def __init__(self) -> None:
        self._capacities: WeakKeyDictionary[Capacity, ref[Capacity]] = WeakKeyDictionary()
        self._of_hardware: dict[object, tuple[Hardware | None, ref[Capacity]]] = {}
        self._places: dict[object, tuple[Location, ref[Place]]] = {}
        self._swept_at = {id(self._of_hardware): _SWEEP, id(self._places): _SWEEP}

    def capacity(self, record: MachineRecord) -> Capacity:
        """Return `capacity_of` a machine; fast for machines that were imported only."""
        if record.facts is not None:
            return self._shared(capacity_of(record))
        key = (record.machine_type, id(record.hardware), labels_of(record))
        known = self._of_hardware.get(key)
        found = known[1]() if known is not None and known[0] is record.hardware else None
        if found is None:
            found = self._shared(capacity_of(record))
            self._sweep(self._of_hardware)
            self._of_hardware[key] = record.hardware, ref(found)
        return found

    def place(self, record: MachineRecord) -> Place:
        """Return `Place.of` a machine's location."""
        known = self._places.get(id(record.location))
        found = known[1]() if known is not None and known[0] is record.location else None
        if found is None:
            found = Place.of(record.location)
            self._sweep(self._places)
            self._places[id(record.location)] = record.location, ref(found)
        return found

    def _shared(self, capacity: Capacity) -> Capacity:
        known = self._capacities.get(capacity)
        found = known() if known is not None else None
        if found is None:
            found = capacity
            self._capacities[found] = ref(found)
        return found

    def _sweep(self, known: dict[object, tuple[T, ref[Any]]]) -> None:
        """Forget objects that no machine has, once there may be many of them."""
        if len(known) < self._swept_at[id(known)]:
            return
        for key in [key for key, (_, kept) in known.items() if kept() is None]:
            del known[key]
        self._swept_at[id(known)] = max(_SWEEP, 2 * len(known))
