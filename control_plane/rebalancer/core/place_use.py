"""Sums the use of MSBs and rows, before a plan and after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.api.rebalancing import PlaceUse
from control_plane.broker.core.capacity import Place
from control_plane.rebalancer.core.model import DIMENSIONS

_DIMENSIONS = len(DIMENSIONS)


@dataclass(slots=True)
class _PlaceSum:
    machines: int = 0
    sizes: list[float] = field(default_factory=lambda: [0.0] * _DIMENSIONS)
    before: list[float] = field(default_factory=lambda: [0.0] * _DIMENSIONS)
    after: list[float] = field(default_factory=lambda: [0.0] * _DIMENSIONS)
    hottest_before: float = 0.0
    hottest_after: float = 0.0

    def add(self, other: _PlaceSum) -> None:
        """Add the machines of another sum."""
        self.machines += other.machines
        for d in range(_DIMENSIONS):
            self.sizes[d] += other.sizes[d]
            self.before[d] += other.before[d]
            self.after[d] += other.after[d]
        self.hottest_before = max(self.hottest_before, other.hottest_before)
        self.hottest_after = max(self.hottest_after, other.hottest_after)


class PlaceSums:
    """Sums the use of machines by place."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], _PlaceSum] = defaultdict(_PlaceSum)
        """By MSB and row."""
        self.measured = 0
        """Machines whose hosts measure their power."""

    def add(
        self, place: Place, sizes: Sequence[float], before: Sequence[float], after: Sequence[float]
    ) -> None:
        """Add one machine: its sizes, and its use before and after the plan."""
        total = self._sums[place.msb, place.row]
        total.machines += 1
        for d, size in enumerate(sizes):
            if size > 0:
                total.sizes[d] += size
                total.before[d] += before[d]
                total.after[d] += after[d]
                total.hottest_before = max(total.hottest_before, before[d] / size)
                total.hottest_after = max(total.hottest_after, after[d] / size)

    def uses(self) -> list[PlaceUse]:
        """Return the use of all places as shares from 0 to 1, sorted by level and name."""
        sums: defaultdict[tuple[str, str], _PlaceSum] = defaultdict(_PlaceSum)
        for (msb, row), total in self._sums.items():
            sums["msb", msb].add(total)
            sums["row", row].add(total)
        return [
            PlaceUse(
                level=level,
                place=name,
                machines=total.machines,
                before=dict(zip(DIMENSIONS, _shares(total.before, total.sizes), strict=True)),
                after=dict(zip(DIMENSIONS, _shares(total.after, total.sizes), strict=True)),
                hottest_before=round(total.hottest_before, 4),
                hottest_after=round(total.hottest_after, 4),
            )
            for (level, name), total in sorted(sums.items())
        ]


def _shares(used: Sequence[float], sizes: Sequence[float]) -> list[float]:
    return [round(u / s, 4) if s > 0 else 0.0 for u, s in zip(used, sizes, strict=True)]
