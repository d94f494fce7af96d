"""The class of a machine: all properties that feasibility and scarcity compare.

Machines of one class in one MSB share a bucket, so every property of a bucket must be here. Memory
and disk are compared to five binary digits: agents report the size that the kernel leaves, which
differs a little between equal machines.

`KindCounts` counts machines by kind and MSB, for the whole region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakValueDictionary

from control_plane.allocator.core.stranding import Totals
from control_plane.broker.core.capacity import Capacity, Place

_DIGITS = 5
Key = tuple[object, ...]
_KNOWN: WeakValueDictionary[Key, Capacity] = WeakValueDictionary()
"""Key of a class → its single object, while a bucket uses it."""


def class_key(capacity: Capacity) -> Key:
    """Return the properties that machines of one class have in common."""
    return (
        *(capacity.machine_type, capacity.generation, capacity.sku, capacity.gpu_type),
        *(capacity.rru, capacity.cpus, capacity.gpus, capacity.network_mbps, capacity.power_w),
        *(_rounded(capacity.memory_bytes), _rounded(capacity.disk_bytes)),
    )


def class_of(capacity: Capacity) -> Capacity:
    """Return the least capacity of machines of this class, without labels and capabilities."""
    key = class_key(capacity)
    found = _KNOWN.get(key)
    if found is None:
        memory, disk = _rounded(capacity.memory_bytes), _rounded(capacity.disk_bytes)
        found = _KNOWN[key] = replace(
            capacity,
            memory_bytes=memory,
            disk_bytes=disk,
            labels=(),
            capabilities=frozenset(),
        )
    return found


def _rounded(size: int) -> int:
    """Return a size rounded down to its first binary digits."""
    rest = size.bit_length() - _DIGITS
    return size >> rest << rest if rest > 0 else size


class KindCounts:
    """Counts machines by kind and MSB; labels, capabilities, row and rack do not matter."""

    def __init__(self) -> None:
        self._totals: Totals | None = None
        self._counts: Counter[tuple[Capacity, Place]] = Counter()

    def __iter__(self) -> Iterator[tuple[Capacity, Place]]:
        """Return each kind and MSB that has a machine."""
        return iter(self._counts)

    def totals(self) -> Totals:
        """Return the sums over all machines; the same object until a machine changes."""
        if self._totals is None:
            self._totals = Totals.of((kind, n) for (kind, _), n in self._counts.items())
        return self._totals

    def count(self, capacity: Capacity, place: Place, number: int) -> None:
        """Record that the region has more or fewer machines like this."""
        if capacity.labels or capacity.capabilities:
            capacity = replace(capacity, labels=(), capabilities=frozenset())
        key = (capacity, Place(place.region, place.datacenter, place.msb, "", ""))
        self._totals = None
        self._counts[key] += number
        if not self._counts[key]:
            del self._counts[key]
