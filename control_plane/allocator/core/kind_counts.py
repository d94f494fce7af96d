"""How many machines of each kind a region has, in each MSB, and what they offer together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from control_plane.allocator.core.stranding import Totals
from control_plane.broker.core.capacity import Capacity, Place


class KindCounts:
    """Kinds of machines, without what only single ones have: labels, capabilities, row and rack."""

    def __init__(self) -> None:
        """Know of no machine yet."""
        self._totals: Totals | None = None
        self._counts: Counter[tuple[Capacity, Place]] = Counter()

    def __iter__(self) -> Iterator[tuple[Capacity, Place]]:
        """Return each kind and MSB that has a machine."""
        return iter(self._counts)

    def totals(self) -> Totals:
        """Return what all machines offer together; the same object until a machine changes."""
        if self._totals is None:
            self._totals = Totals.of((kind, n) for (kind, _), n in self._counts.items())
        return self._totals

    def count(self, capacity: Capacity, place: Place, number: int) -> None:
        """Note that the region has more or fewer machines like this."""
        if capacity.labels or capacity.capabilities:
            capacity = replace(capacity, labels=(), capabilities=frozenset())
        key = (capacity, Place(place.region, place.datacenter, place.msb, "", ""))
        self._totals = None
        self._counts[key] += number
        if not self._counts[key]:
            del self._counts[key]
