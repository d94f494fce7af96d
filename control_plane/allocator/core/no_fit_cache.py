"""Demands that found no room, remembered until room is freed."""

from __future__ import annotations

from control_plane.allocator.core.demand import Demand

_KEPT = 8


class Relief:
    """Counts, for the whole region, how often power was released that a request lacked."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class NoFitCache:
    """The last demands of different sizes for which a bucket had no room, at one of its gains."""

    __slots__ = ("_at", "_demands")

    def __init__(self) -> None:
        self._demands: list[Demand] = []
        self._at = 0

    def include(self, demand: Demand, gain: int) -> bool:
        """Return whether this demand or a smaller one found no room at this gain."""
        if self._at == gain:
            for missed in self._demands:
                if demand.is_no_less_than(missed):
                    return True
        return False

    def add(self, demand: Demand, gain: int) -> None:
        """Record that a demand found no room at this gain."""
        if self._at != gain:
            self._demands, self._at = [], gain
        kept = [missed for missed in self._demands if not missed.is_no_less_than(demand)]
        self._demands = [demand, *kept[: _KEPT - 1]]
