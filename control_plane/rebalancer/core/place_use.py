"""What is used of MSBs and rows, before a plan and after it."""

from __future__ import annotations

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


class PlaceSums:
    """Adds machines up by the places that they are in."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _PlaceSum] = {}
        self.measured = 0
        """Machines whose hosts say what they draw."""

    def add(
        self, place: Place, sizes: Sequence[float], used: tuple[Sequence[float], Sequence[float]]
    ) -> None:
        """Count one machine: what it has, and what is used of it before and after."""
        shares = [_shares(each, sizes) for each in used]
        for level, name in (("msb", place.msb), ("row", place.row)):
            found = self._sums.setdefault((level, name), _PlaceSum())
            found.machines += 1
            found.hottest_before = max(found.hottest_before, *shares[0])
            found.hottest_after = max(found.hottest_after, *shares[1])
            for d in range(_WIDE):
                if sizes[d] > 0:
                    found.sizes[d] += sizes[d]
                    found.before[d] += used[0][d]
                    found.after[d] += used[1][d]

    def uses(self) -> list[PlaceUse]:
        """Return all places by level and name; shares from 0 to 1 by dimension."""
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
            for (level, name), found in sorted(self._sums.items())
        ]


def _shares(used: Sequence[float], sizes: Sequence[float]) -> list[float]:
    return [round(u / s, 4) if s > 0 else 0.0 for u, s in zip(used, sizes, strict=True)]
