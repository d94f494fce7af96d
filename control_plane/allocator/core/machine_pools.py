"""Machines as allocations see them: what is left on each, on shelves by how much that is.

    pool (an entitlement, or the free pool)
      └─ bucket: its machines of one type in one MSB
           └─ shelf: those with about the same share of room left

What allocations need to know of a machine lies in one small object; what many machines have
in common (capacity, place, bucket) is shared. A million machines take about 300 MB.
Only `region_index` changes what is here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import FIRST_PORT, LAST_PORT, PORTS, bin_of
from control_plane.api.policy import Property
from control_plane.broker.core.capacity import Capacity, Place, micro

FREE = ""
"""The name of the free pool."""
_CUTS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Shares of a machine's room between which it is on one shelf."""
_CLASSES = len(_CUTS) + 1
_BY_ROOM = sorted(
    ((rru, memory) for rru in range(_CLASSES) for memory in range(_CLASSES)),
    key=lambda c: (min(c), sum(c)),
    reverse=True,
)
"""Classes of RRU and memory left, most room first."""
_SHELF = {classes: 1 + place for place, classes in enumerate(_BY_ROOM)}
_SHELF_OF = [[_SHELF[rru, memory] for memory in range(_CLASSES)] for rru in range(_CLASSES)]
_EMPTY, _BLOCKED = 0, 1 + len(_BY_ROOM)
"""Shelves are numbered as they are looked at: the machines without tasks, those with room by
its classes, the unusable."""
_ORDERS = {
    (rru, memory): (
        _EMPTY,
        *(shelf for (r, m), shelf in _SHELF.items() if r >= rru and m >= memory),
    )
    for rru, memory in _BY_ROOM
}
"""By the least classes of RRU and memory that may do: the shelves to look at."""


_NOWHERE = Place("", "", "", "", "")


class Ports:
    """Ports of one machine; made when the first task asks for one."""

    __slots__ = ("next", "taken")

    def __init__(self, taken: Iterable[int] = (), next_: int = FIRST_PORT) -> None:
        """Begin the search for free ports at `next_`, so that old ones are not reused soon."""
        self.taken = set(taken)
        self.next = next_

    def pick(self, names: Iterable[str]) -> dict[str, int]:
        """Take a free port for each name; the caller judged that there are enough."""
        found = {}
        for name in names:
            while self.next in self.taken:
                self._advance()
            found[name] = self.next
            self.taken.add(self.next)
            self._advance()
        return found

    def _advance(self) -> None:
        self.next = FIRST_PORT if self.next >= LAST_PORT else self.next + 1


class Holder(Protocol):
    """A job with tasks on a machine, as a machine knows it: `claims.Claims`."""

    job: str
    valid: bool
    needs_usable: bool


class Machine:
    """What allocations know of one machine. Only `RegionIndex` changes it."""

    __slots__ = (
        "at",
        "blocked",
        "bucket",
        "capacity",
        "free_cpu",
        "free_disk",
        "free_gpus",
        "free_memory",
        "free_network",
        "jobs",
        "name",
        "place",
        "ports",
        "shelf",
    )

    def __init__(self, name: str, capacity: Capacity, place: Place, blocked: str) -> None:
        """Make an empty machine that is on no shelf yet."""
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
        self.shelf = 0
        self.at = 0
        """Position on its shelf; -1: it has left the region."""

    @property
    def free_ports(self) -> int:
        """How many ports no task has."""
        return PORTS - len(self.ports.taken) if self.ports else PORTS

    @property
    def pool(self) -> str:
        """The entitlement that holds it, or `FREE`."""
        return self.bucket.pool.name


class Space:
    """A copy of a machine's room, in which a plan takes and frees before it is sure."""

    __slots__ = ("free_cpu", "free_disk", "free_gpus", "free_memory", "free_network", "ports")

    def __init__(self, machine: Machine) -> None:
        """Copy what is left on a machine."""
        self.free_cpu = machine.free_cpu
        self.free_memory = machine.free_memory
        self.free_gpus = machine.free_gpus
        self.free_network = machine.free_network
        self.free_disk = machine.free_disk
        ports = machine.ports
        self.ports = Ports(ports.taken, ports.next) if ports else None

    @staticmethod
    def whole(capacity: Capacity) -> Space:
        """Return the room of a machine on which there is nothing."""
        return Space(Machine("", capacity, _NOWHERE, ""))

    @property
    def free_ports(self) -> int:
        """How many ports no task has."""
        return PORTS - len(self.ports.taken) if self.ports else PORTS

    def take(self, demand: Demand, capacity: Capacity, times: int = 1) -> None:
        """Subtract tasks; a negative number gives their room back. Ports are separate."""
        self.free_cpu -= demand.cpu_on(capacity) * times
        self.free_memory -= demand.memory_bytes * times
        self.free_gpus -= demand.gpus * times
        self.free_network -= demand.network_mbps * times
        self.free_disk -= demand.disk_bytes * times

    def pick_ports(self, names: Iterable[str]) -> dict[str, int]:
        """Take the ports of one task."""
        if self.ports is None:
            self.ports = Ports()
        return self.ports.pick(names)


class Bucket:
    """The machines of one pool that have type, RRU and MSB in common.

    It can be asked like a machine for the properties that they share.
    """

    __slots__ = (
        "_missed_at",
        "_misses",
        "capacity",
        "gain",
        "most_memory",
        "moves",
        "place",
        "pool",
        "shelves",
        "size",
    )
    name = blocked = ""

    def __init__(self, pool: Pool, capacity: Capacity, place: Place) -> None:
        """Make an empty bucket for machines like this."""
        self.pool = pool
        self.capacity = capacity
        self.place = place
        self.size = 0
        self.most_memory = 1
        """Of any machine that was ever here; those of one type differ by a little."""
        self.shelves: list[list[Machine] | None] = [None] * (_BLOCKED + 1)
        self.gain = 0
        """Rises whenever a machine here gets more room or becomes usable."""
        self.moves = 0
        """Rises before and after a machine changes shelves: odd while it does."""
        self._misses: list[Demand] | None = None
        """Demands for which no machine here had room …"""
        self._missed_at = 0
        """… when `gain` was this."""

    def put_all(self, machines: list[Machine]) -> None:
        """Put machines that come into this bucket on the shelf where all of them belong."""
        sample = machines[0]
        shelf = shelf_of(sample)
        self.most_memory = max(self.most_memory, sample.capacity.memory_bytes)
        row = self.shelves[shelf]
        if row is None:
            row = self.shelves[shelf] = []
        for at, machine in enumerate(machines, len(row)):
            machine.bucket, machine.shelf, machine.at = self, shelf, at
        row += machines

    def drop(self, machine: Machine) -> None:
        """Take a machine off its shelf: the last one there takes its position."""
        row = self.shelves[machine.shelf]
        assert row is not None
        last = row.pop()
        if last is not machine:
            row[machine.at] = last
            last.at = machine.at

    def reshelve(self, machine: Machine) -> None:
        """Bring a machine to another shelf if what is left on it changed that much."""
        shelf = shelf_of(machine)
        if shelf != machine.shelf:
            self.moves += 1
            self.drop(machine)
            self._put(machine, shelf)
            self.moves += 1

    def _put(self, machine: Machine, shelf: int) -> None:
        row = self.shelves[shelf]
        if row is None:
            row = self.shelves[shelf] = []
        machine.shelf, machine.at = shelf, len(row)
        row.append(machine)

    def first(self) -> Machine | None:
        """Return a machine with most room; one that takes no tasks if there is no other."""
        for row in self.shelves:
            if row:
                for machine in row:  # another thread may just have emptied it
                    return machine
        return None

    def usable(
        self, demand: Demand | None = None, *, fullest_first: bool = False
    ) -> Iterator[Machine]:
        """Return the machines that take tasks, most room first, while others change it.

        Shelves whose machines cannot have room for the demand are left out.
        """
        order = _ORDERS[(0, 0) if demand is None else self._least(demand)]
        if fullest_first:
            order = order[::-1]
        return chain.from_iterable(filter(None, map(self.shelves.__getitem__, order)))

    def _least(self, demand: Demand) -> tuple[int, int]:
        """Return the classes of RRU and memory below which no machine has room."""
        capacity = self.capacity
        rru = demand.cpu_on(capacity) / capacity.cpu_room if capacity.cpu_room else 0.0
        memory = demand.memory_bytes / self.most_memory
        return bisect_right(_CUTS, rru - _ROUNDING), bisect_right(_CUTS, memory - _ROUNDING)

    def machines(self) -> Iterator[Machine]:
        """Yield all machines, also those that take no tasks."""
        for row in self.shelves:
            yield from row or ()

    def is_hopeless(self, demand: Demand) -> bool:
        """Return whether this demand or a smaller one found no room since anything got better."""
        if self._misses is not None and self._missed_at == self.gain:
            for missed in self._misses:
                if demand.is_no_less_than(missed):
                    return True
        return False

    def missed(self, demand: Demand, gain: int, moves: int) -> None:
        """Remember that no machine had room while `gain` and `moves` were as given.

        Where machines changed shelves meanwhile, one may have been passed over unseen.
        """
        if moves != self.moves or moves % 2:
            return
        if self._misses is None or self._missed_at != gain:
            self._misses, self._missed_at = [], gain
        kept = [missed for missed in self._misses if not missed.is_no_less_than(demand)]
        self._misses = [demand, *kept[: _MISSES_KEPT - 1]]


_MISSES_KEPT = 8
_ROUNDING = 1e-5


def shelf_of(machine: Machine) -> int:
    """Return the shelf on which a machine belongs."""
    if machine.blocked:
        return _BLOCKED
    if not machine.jobs:
        return _EMPTY
    capacity = machine.capacity
    memory = machine.free_memory / capacity.memory_bytes if capacity.memory_bytes else 0.0
    rru = machine.free_cpu / capacity.cpu_room if capacity.cpu_room else 1.0
    return _SHELF_OF[bisect_right(_CUTS, rru)][bisect_right(_CUTS, memory)]


Bins = tuple[str, ...]
_SAME: dict[Bins, Bins] = {}
"""Bins → the one object for them in all pools; a region has some thousand."""


class Partition(dict[Bins, tuple["Bucket", ...]]):
    """The buckets of a pool by their bins."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        """Hold nothing yet."""
        super().__init__()
        self._groups: dict[Bins, list[Bins]] | None = None

    @property
    def groups(self) -> dict[Bins, list[Bins]]:
        """Bins by all of them but the first: made once, when nothing is added any more."""
        groups = self._groups
        if groups is None:
            groups = {}
            for bins in self:
                groups.setdefault(bins[1:], []).append(bins)
            self._groups = groups
        return groups


NOTHING = Partition()


class Pool:
    """The machines of one entitlement, or the free ones."""

    __slots__ = ("_partitions", "buckets", "gain", "micro_rru", "name", "per_type", "size")

    def __init__(self, name: str) -> None:
        """Hold nothing yet."""
        self.name = name
        self.gain = 0
        """Rises whenever a machine here gets more room or becomes usable."""
        self.size = 0
        self.micro_rru = 0
        self.per_type: Counter[str] = Counter()
        self.buckets: dict[tuple[object, ...], Bucket] = {}
        self._partitions: dict[tuple[Property, ...], Partition] = {}

    def bucket(self, machine: Machine) -> Bucket:
        """Return the bucket of a machine's kind and MSB; makes it if need be."""
        capacity, place = machine.capacity, machine.place
        kind = (capacity.machine_type, capacity.generation, capacity.sku, capacity.gpu_type)
        key = (*kind, capacity.rru, place.region, place.msb)
        found = self.buckets.get(key)
        if found is None:
            found = self.buckets[key] = Bucket(self, capacity, place)
            self._partitions = {}
        return found

    def partition(self, properties: tuple[Property, ...]) -> Partition:
        """Return the buckets by the bins of properties that a bucket's machines share."""
        partitions = self._partitions  # another thread's new bucket may replace them
        found = partitions.get(properties)
        if found is None:
            found = Partition()
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
        """Add a machine to the sums, or take it out of them."""
        self.size += sign
        self.micro_rru += sign * micro(machine.capacity.rru)
        self.per_type[machine.capacity.machine_type] += sign
