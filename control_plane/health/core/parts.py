"""The parts of a region that fail together, and how many machines of each are lost.

A rack loses its switch, an MSB its power, a data center its line to the rest. A region with many
losses at once is probably up, and the control plane is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from agent.api import Location


class Level(StrEnum):
    """The kind of a part, the largest first. Rows are left out: no failure takes a whole row."""

    REGION = "region"
    DATACENTER = "data center"
    MSB = "MSB"
    RACK = "rack"


class Standing(StrEnum):
    """How one machine counts in its parts."""

    WELL = "well"
    LOST = "lost"
    """Silent for a while, or declared down a moment ago."""
    GONE = "gone"
    """Down for long: it no longer shows the state of its part."""


@dataclass(slots=True, eq=False)
class Part:
    """A region, data center, MSB or rack."""

    level: Level
    name: str
    """Includes the names of all parts above it: `local/dc1/msb2`."""
    above: Part | None = None
    below: dict[str, Part] = field(default_factory=dict)
    machines: int = 0
    """Its machines that are not `GONE`."""
    lost: int = 0
    path: tuple[Part, ...] = ()
    """This part and all parts above it, the largest last."""

    def __post_init__(self) -> None:
        """Compute the parts above."""
        self.path = (self,) if self.above is None else (self, *self.above.path)

    def count_change(self, before: Standing | None, after: Standing | None) -> None:
        """Count the change of a machine's standing; None: before it joins, or after it leaves."""
        machines = (after in _COUNTED) - (before in _COUNTED)
        lost = (after is Standing.LOST) - (before is Standing.LOST)
        for part in self.path:
            part.machines += machines
            part.lost += lost


_COUNTED = (Standing.WELL, Standing.LOST)


class Parts:
    """All parts of the region that hold machines."""

    def __init__(self) -> None:
        self._regions: dict[str, Part] = {}

    def rack(self, location: Location) -> Part:
        """Return the rack at a location; creates it if it is not known."""
        part: Part | None = None
        known = self._regions
        for level, word in (
            (Level.REGION, location.region),
            (Level.DATACENTER, location.datacenter),
            (Level.MSB, location.msb),
            (Level.RACK, f"{location.row}/{location.rack}"),
        ):
            child = known.get(word)
            if child is None:
                name = word if part is None else f"{part.name}/{word}"
                child = known[word] = Part(level, name, part)
            part, known = child, child.below
        assert part is not None
        return part


def seems_cut_off(part: Part, share: float) -> bool:
    """Return whether a part lost more than a share of its machines, so it may be cut off itself.

    One lost machine is never enough. If only one part below it is lost and the rest answers, this
    part is not cut off: the share must also be exceeded without its worst part.
    """
    if part.lost <= 1 or part.lost <= share * part.machines:
        return False
    below = [child for child in part.below.values() if child.machines]
    if len(below) <= 1:
        return all(seems_cut_off(child, share) for child in below)
    worst = max(below, key=lambda child: child.lost)
    return part.lost - worst.lost > share * (part.machines - worst.machines)
