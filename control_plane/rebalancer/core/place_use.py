"""What is used of MSBs and rows, before a plan and after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.api.rebalancing import PlaceUse
from control_plane.broker.core.capacity import Place
from control_plane.rebalancer.core.model import DIMENSIONS

_WIDE = len(DIMENSIONS)


@dataclass(slots=True)
class _PlaceSum:
    machines: int = 0
    sizes: list[float] = field(default_factory=lambda: [0.0] * _WIDE)
    before: list[float] = field(default_factory=lambda: [0.0] * _WIDE)
    after: list[float] = field(default_factory=lambda: [0.0] * _WIDE)
    hottest_before: float = 0.0
    hottest_after: float = 0.0

    def add(self, other: _PlaceSum) -> None:
        """Add the machines of another one."""
        self.machines += other.machines
        for mine, theirs in (
            (self.sizes, other.sizes),
            (self.before, other.before),
            (self.after, other.after),
        ):
            mine[:] = [one + two for one, two in zip(mine, theirs, strict=True)]
        self.hottest_before = max(self.hottest_before, other.hottest_before)
        self.hottest_after = max(self.hottest_after, other.hottest_after)


class PlaceSums:
    """Adds machines up by the places that they are in."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _PlaceSum] = {}
        """By MSB and row: each machine is counted once, and there may be many."""
        self.measured = 0
        """Machines whose hosts say what they draw."""

    def add(
        self, place: Place, sizes: Sequence[float], before: Sequence[float], after: Sequence[float]
    ) -> None:
        """Count one machine: what it has, and what is used of it before and after."""
        found = self._sums.get((place.msb, place.row))
        if found is None:
            found = self._sums[place.msb, place.row] = _PlaceSum()
        found.machines += 1
        for d, size in enumerate(sizes):
            if size > 0:
                was, later = before[d], after[d]
                found.sizes[d] += size
                found.before[d] += was
                found.after[d] += later
                if was > found.hottest_before * size:
                    found.hottest_before = was / size
                if later > found.hottest_after * size:
                    found.hottest_after = later / size

    def uses(self) -> list[PlaceUse]:
        """Return all places by level and name; shares from 0 to 1 by dimension."""
        sums: defaultdict[tuple[str, str], _PlaceSum] = defaultdict(_PlaceSum)
        for (msb, row), found in self._sums.items():
            sums["msb", msb].add(found)
            sums["row", row].add(found)
        return [
            PlaceUse(
                level=level,
                place=name,
                machines=found.machines,
                before=dict(zip(DIMENSIONS, _shares(found.before, found.sizes), strict=True)),
                after=dict(zip(DIMENSIONS, _shares(found.after, found.sizes), strict=True)),
                hottest_before=round(found.hottest_before, 4),
                hottest_after=round(found.hottest_after, 4),
            )
            for (level, name), found in sorted(sums.items())
        ]


def _shares(used: Sequence[float], sizes: Sequence[float]) -> list[float]:
    return [round(u / s, 4) if s > 0 else 0.0 for u, s in zip(used, sizes, strict=True)]
