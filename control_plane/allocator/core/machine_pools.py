"""Machines with their free room, in pools, buckets and space classes.

    pool (an entitlement, or the free pool)
      └─ bucket: its machines of one class in one MSB
           └─ space class: machines with about the same share of free room

Each machine is one small object; properties that many machines share (capacity, place, bucket) are
shared objects. A million machines take about 300 MB. Only `region_index` changes these objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import PORTS, admits_any_of, bin_of
from control_plane.allocator.core.free_space_classes import (
    BLOCKED,
    BY_TIGHTNESS,
    EMPTY,
    most_room_first,
    space_class_of,
    tightness,
)
from control_plane.allocator.core.machine_class import class_key, class_of
from control_plane.allocator.core.machines_by_class import MachinesByClass
from control_plane.allocator.core.no_fit_cache import NoFitCache, Relief
from control_plane.allocator.core.partition import Bins, Partition
from control_plane.allocator.core.ports import Ports as Ports
from control_plane.broker.core.capacity import Capacity, Place, micro


class Holder(Protocol):
    """The claims of a job with tasks on a machine (`claims.Claims`)."""

    job: str
    valid: bool
    needs_usable: bool


class Supply(Protocol):
    """The power that is left after the changes of a plan."""

    powered_on: set[Machine]
    """Machines without tasks that the plan uses; their power is counted."""

    def has_power(self, place: Place, watts: int) -> bool:
        """Return whether a machine in a place may get its first task."""
        ...


class Machine:
    """One machine with its free room. Only `RegionIndex` changes it."""

    __slots__ = (
        *("at", "blocked", "bucket", "capacity", "free_cpu", "free_disk", "free_gpus"),
        *("free_memory", "free_network", "jobs", "name", "place", "ports", "space_class"),
    )

    def __init__(self, name: str, capacity: Capacity, place: Place, blocked: str) -> None:
        """Make an empty machine that is in no space class."""
        self.name = name
        self.capacity = capacity
        self.place = place
        self.blocked = blocked
        self.free_cpu = capacity.cpu_room
        self.free_memory = capacity.memory_bytes
        self.free_gpus: float = capacity.gpus
        self.free_network = capacity.network_mbps
        self.free_disk = capacity.disk_bytes
        self.jobs: tuple[Holder, ...] = ()
        """The jobs with tasks here, once per task."""
        self.ports: Ports | None = None
        self.bucket: Bucket
        self.space_class = 0
        self.at = 0
        """Position in its space class; -1 if it has left the region."""

    @property
    def free_ports(self) -> int:
        """How many ports no task has."""
        return PORTS - len(self.ports.taken) if self.ports else PORTS

    @property
    def pool(self) -> str:
        """The entitlement that holds it, or `FREE` (`broker.core.assignment`)."""
        return self.bucket.pool.name


class Bucket(MachinesByClass[Machine]):
    """The machines of one pool that have class and MSB in common.

    A bucket can be used like a machine for the shared properties (`feasibility.OF_BUCKETS`).
    """

    __slots__ = ("_cells", "_no_fit_cache", "gain", "memo", "most_disk", "place", "pool", "size")
    name = blocked = ""
    has_own_bins = False

    def __init__(self, pool: Pool, capacity: Capacity, place: Place) -> None:
        """Make an empty bucket for machines of this class and MSB."""
        super().__init__(capacity)
        self._cells: dict[bool | None, list[Cell]] = {}
        """Made when first read; empty again after machines came or went."""
        self.memo: dict[object, Any] = {}  # cache of fine_bins, until a machine comes or goes
        self.pool = pool
        self.place = place
        self.size = 0
        self.most_disk = 1
        """Largest disk of all machines that were ever in this bucket, like `most_memory`."""
        self.gain = 0
        """Rises whenever a machine here gets more room or becomes usable."""
        self._no_fit_cache: NoFitCache | None = None
        """Made when a demand finds no room for the first time."""

    def put_all(self, machines: list[Machine]) -> None:
        """Add equal machines to this bucket, in their common space class."""
        sample = machines[0]
        self._changed()
        space_class = space_class_of(sample)
        self.most_memory = max(self.most_memory, sample.capacity.memory_bytes)
        self.most_disk = max(self.most_disk, sample.capacity.disk_bytes)
        row = self.by_class[space_class]
        if row is None:
            row = self.by_class[space_class] = []
        for at, machine in enumerate(machines, len(row)):
            machine.bucket, machine.space_class, machine.at = self, space_class, at
        row += machines
        self.maxima.raised(sample)

    def drop(self, machine: Machine) -> None:
        """Take a machine out of the bucket."""
        self._changed()
        self._remove(machine)

    def _changed(self) -> None:
        self._cells, self.memo = {}, {}
        self.pool.shape += 1

    @property
    def bucket(self) -> Bucket:
        """Return itself: a whole bucket may be used as a `Part`."""
        return self

    @property
    def gain_count(self) -> int:
        """A number that rises whenever a demand that lacked room or power may fit."""
        return self.gain + self.pool.relief.count

    def usable(
        self, demand: Demand | None = None, *, tight: bool = False, supply: Supply | None = None
    ) -> Iterator[Machine]:
        """Yield the machines that take tasks; the bucket may change meanwhile.

        Machines with most room come first; with `tight`, those with least room. Machines with GPUs
        are ordered by free GPUs, fewest first, and machines without tasks last. Space classes that
        cannot have room for the demand are left out, and so are empty machines without power.
        """
        if tight and not self.is_scarce:
            return self._tightest(demand, supply)
        return self._on(self._promising(self._order(demand), demand), supply)

    def _on(self, order: Iterable[int], supply: Supply | None = None) -> Iterator[Machine]:
        if supply is None:
            return chain.from_iterable(filter(None, map(self.by_class.__getitem__, order)))
        rows = (self._powered(supply) if n == EMPTY else self.by_class[n] for n in order)
        return chain.from_iterable(filter(None, rows))

    def _powered(self, supply: Supply) -> Iterator[Machine]:
        """Yield machines without tasks that have power; skips racks and MSBs without power."""
        watts = self.capacity.power_w
        racks = (
            self._racks() if self.by_class[EMPTY] and supply.has_power(self.place, watts) else ()
        )
        for rack in racks:
            if supply.has_power(rack.place, watts):
                yield from (m for m in rack.machines if not m.space_class and m.bucket is self)
        for machine in list(supply.powered_on):
            if machine.bucket is self and not machine.space_class:
                yield machine

    def _racks(self) -> list[Cell]:
        racks = self._cells.get(None)
        if racks is None:
            found: dict[str, list[Machine]] = {}
            for machine in self.machines():
                found.setdefault(machine.place.rack, []).append(machine)
            racks = self._cells[None] = [Cell(self, machines) for machines in found.values()]
        return racks

    def _tightest(self, demand: Demand | None, supply: Supply | None) -> Iterator[Machine]:
        for alike in BY_TIGHTNESS[self._least(demand)]:
            yield from sorted(self._on(self._promising(alike, demand)), key=tightness)
        yield from self._on(self._promising((EMPTY,), demand), supply)

    def cells(self, *, by_size: bool = False) -> list[Cell]:
        """Return its machines by rack, labels and capabilities; `by_size` by rack and capacity."""
        cells = self._cells.get(by_size)
        if cells is None:
            found: dict[object, list[Machine]] = {}
            for machine in self.machines():
                capacity = machine.capacity
                words = capacity.labels, capacity.capabilities
                key = (machine.place.rack, capacity if by_size else words)
                found.setdefault(key, []).append(machine)
            cells = self._cells[by_size] = [Cell(self, machines) for machines in found.values()]
        return cells

    def is_no_fit(self, demand: Demand) -> bool:
        """Return whether this demand or a smaller one found no room since the last gain."""
        return self._no_fit_cache is not None and self._no_fit_cache.include(
            demand, self.gain_count
        )

    def is_closed(self, demand: Demand) -> bool:
        """Return whether the demand is known not to fit here, or larger than every machine."""
        capacity = self.capacity
        return (
            self.is_no_fit(demand)
            or demand.memory_bytes > self.most_memory
            or demand.cpu_on(capacity) > capacity.cpu_room
            or demand.gpus > capacity.gpus
            or demand.network_mbps > capacity.network_mbps
            or demand.disk_bytes > self.most_disk
        )

    def note_no_fit(self, demand: Demand, gain_count: int, moves: int) -> None:
        """Remember that no machine had room while `gain_count` and `moves` had these values.

        Nothing is remembered if machines changed classes meanwhile: the search may have missed one.
        Exact maxima of the searched classes save the next demand of another size this search.
        """
        if moves == self.moves and not moves % 2:
            if self._no_fit_cache is None:
                self._no_fit_cache = NoFitCache()
            self._no_fit_cache.add(demand, gain_count)
            for space_class in self._promising(self._order(demand), demand):
                if len(self.by_class[space_class] or ()) > _FEW:
                    self.roomiest("memory", space_class)
                    self.roomiest("cpu", space_class)


_FEW = 16
"""Space classes with at most this many machines are searched; others keep an exact maximum."""


class Cell:
    """Machines of a bucket that also share the rack, labels and capabilities; or one machine."""

    __slots__ = ("_all", "bucket", "capacity", "has_own_bins", "machines", "name", "place", "size")
    blocked = ""

    def __init__(
        self, bucket: Bucket, machines: list[Machine], *, has_own_bins: bool = False
    ) -> None:
        """`machines` has at least one; `has_own_bins` marks a single one with its own bins."""
        self.bucket = bucket
        self.machines = machines
        self.size = len(machines)
        self._all: frozenset[Machine] = frozenset()
        self.has_own_bins = has_own_bins
        sample = machines[0]
        self.capacity, self.place = sample.capacity, sample.place
        self.name = sample.name if has_own_bins else ""

    @staticmethod
    def of(bucket: Bucket, cells: list[Cell]) -> Bucket | Cell:
        """Return several cells of a bucket as one part."""
        if sum(cell.size for cell in cells) == bucket.size:
            return bucket
        if len(cells) == 1:
            return cells[0]
        return Cell(bucket, [machine for cell in cells for machine in cell.machines])

    @property
    def is_scarce(self) -> bool:
        """Whether its machines have a rare resource."""
        return self.bucket.is_scarce

    def usable(
        self, demand: Demand | None = None, *, tight: bool = False, supply: Supply | None = None
    ) -> Iterator[Machine]:
        """Return the machines that take tasks, in the order of `Bucket.usable`."""
        if self.size * 2 > self.bucket.size and not (supply or tight or self.is_scarce):
            self._all = self._all or frozenset(self.machines)
            return filter(self._all.__contains__, self.bucket.usable(demand))
        gpus, watts = 0 if demand is None else demand.gpus, self.bucket.capacity.power_w
        usable = (
            m
            for m in self.machines
            if (m.space_class != BLOCKED and m.bucket is self.bucket and m.free_gpus >= gpus)
            and (not supply or m.jobs or m in supply.powered_on or supply.has_power(m.place, watts))
        )
        if self.is_scarce:
            return iter(sorted(usable, key=lambda m: m.space_class or BLOCKED))
        if tight:
            return iter(sorted(usable, key=lambda m: (not m.jobs, tightness(m))))
        return most_room_first(usable)


Part = Bucket | Cell
"""All machines of one bucket, or some."""


BucketOrder = tuple[tuple[Bucket, bool], ...]
"""Buckets in the order of their use, and whether the machines of each are filled one by one."""
Binned = Mapping[Bins, Sequence[Part]]
"""Machines of a pool by their bins."""
_SAME: dict[Bins, Bins] = {}
"""Bins → the single object for them in all pools; a region has a few thousand."""


def _key(capacity: Capacity, place: Place) -> tuple[object, ...]:
    return (*class_key(capacity), place.region, place.msb)


class Pool:
    """The machines of one entitlement, or the free ones."""

    __slots__ = (
        *("_no_fit_at", "_no_fit_cache", "_partitions", "buckets", "fine", "gain", "micro_rru"),
        *("name", "per_type", "relief", "shape", "size"),
    )

    def __init__(self, name: str, gain: int = 0, relief: Relief | None = None) -> None:
        self.relief = relief or Relief()
        self.name = name
        self.gain = gain
        """Rises whenever a machine here gets more room or becomes usable."""
        self.size = 0
        self.micro_rru = 0
        self.per_type: Counter[str] = Counter()
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self._partitions: dict[tuple[str, ...], Partition[Bucket]] = {}
        self.fine: dict[object, Any] = {}  # cache of fine_bins
        self.shape = 0  # rises when a machine comes or goes
        self._no_fit_cache: set[tuple[object, ...]] = set()
        """Sizes of demands for which no bucket had room at `_no_fit_at`."""
        self._no_fit_at = 0
        """The value of `gain` plus relief for which `_no_fit_cache` hold."""

    def is_no_fit(self, demand: Demand) -> bool:
        """Return whether this demand found no room in any bucket since the last gain of room."""
        return (
            self._no_fit_at == self.gain + self.relief.count and demand.size in self._no_fit_cache
        )

    def note_no_fit(self, demand: Demand) -> None:
        """Record that a demand found no room, if that holds for every bucket."""
        gain_count = self.gain + self.relief.count
        if self._no_fit_at != gain_count:
            self._no_fit_cache, self._no_fit_at = set(), gain_count
        if all(
            not bucket.size or bucket.is_closed(demand) or not admits_any_of(demand, bucket)
            for bucket in list(self.buckets.values())
        ):
            self._no_fit_cache.add(demand.size)

    def bucket(self, machine: Machine) -> Bucket:
        """Return the bucket of a machine's class and MSB; a new one if there is none."""
        key = _key(machine.capacity, machine.place)
        found = self.buckets.get(key)
        if found is None:
            place = machine.place
            place = Place(place.region, place.datacenter, place.msb, "", "")
            found = self.buckets[key] = Bucket(self, class_of(machine.capacity), place)
            self._partitions = {}
        return found

    def drop(self, bucket: Bucket) -> None:
        """Forget a bucket that has no machine."""
        del self.buckets[_key(bucket.capacity, bucket.place)]
        self._partitions = {}

    def partition(self, properties: tuple[str, ...]) -> Partition[Bucket]:
        """Return the buckets by the bins of properties that a bucket's machines share."""
        partitions = self._partitions  # a new bucket in another thread may replace this object
        found = partitions.get(properties)
        if found is None:
            found = Partition[Bucket]()
            for bucket in list(self.buckets.values()):
                bins = tuple([bin_of(p, bucket) for p in properties])
                bins = _SAME.setdefault(bins, bins)
                found[bins] = (*found.get(bins, ()), bucket)
            partitions[properties] = found
        return found

    def machines(self) -> Iterator[Machine]:
        """Yield all its machines."""
        for bucket in list(self.buckets.values()):
            yield from bucket.machines()

    def count(self, machine: Machine, sign: int) -> None:
        """Add a machine to the sums, or subtract it."""
        self.size += sign
        self.micro_rru += sign * micro(machine.capacity.rru)
        self.per_type[machine.capacity.machine_type] += sign
