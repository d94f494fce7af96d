"""The buckets of a pool by bins, with cached results that hold until a bucket comes or goes."""

from __future__ import annotations

from typing import TypeVar

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.stranding import Totals

B = TypeVar("B")
Bins = tuple[str, ...]
"""The bins of machines, one for each preference of a job."""
_ORDERS_KEPT = 64


class Partition(dict[Bins, tuple[B, ...]]):
    """The buckets of a pool by their bins."""

    __slots__ = ("_combined", "_groups", "_orders", "_totals")

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[Bins, list[Bins]] | None = None
        self._combined: tuple[Partition[B], list[tuple[list[Bins], list[Bins]]]] | None = None
        self._orders: dict[tuple[object, ...], dict[Bins, tuple[tuple[B, bool], ...]]] = {}
        self._totals: Totals | None = None

    def orders(self, demand: Demand, totals: Totals) -> dict[Bins, tuple[tuple[B, bool], ...]]:
        """Return the cache of bins → buckets in their order for such a demand."""
        if totals is not self._totals or len(self._orders) > _ORDERS_KEPT:
            self._orders, self._totals = {}, totals
        return self._orders.setdefault(demand.size, {})

    @property
    def groups(self) -> dict[Bins, list[Bins]]:
        """Bins, grouped by all but the first; made once, after the last bucket was added."""
        groups = self._groups
        if groups is None:
            groups = {}
            for bins in self:
                groups.setdefault(bins[1:], []).append(bins)
            self._groups = groups
        return groups

    def grouped_with(self, free: Partition[B]) -> list[tuple[list[Bins], list[Bins]]]:
        """Return for each group the bins of this partition, and those that only `free` has."""
        known = self._combined
        if known is None or known[0] is not free:
            own_groups, free_groups = self.groups, free.groups
            found = [
                (
                    own_groups.get(name, []),
                    [bins for bins in free_groups.get(name, ()) if bins not in self],
                )
                for name in dict.fromkeys((*own_groups, *free_groups))
            ]
            known = self._combined = free, found
        return known[1]
