"""Computes the spare machines of a region: one central buffer, or one for each owner (EL10).

Owners do not all have failures, updates, growth and maintenance at the same time. A central buffer
covers the largest case of the region; separate buffers cover the sum of the largest cases. The gain
in the paper is about 3 points of utilization (§6.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from control_plane.api.elastic import Buffer, Buffers, UseHistory
from control_plane.elastic.core.expecting import growth_by_slot, quantile, sum_by_slot

RELEASES_AT_ONCE = 10
"""Owners whose largest updates overlap: extra tasks live for minutes. A margin, not measured."""
MAINTENANCE_SHARE = 0.02
"""Share of machines under maintenance at once: the ops planner's waves bound it per rack or row."""
GROWTH_SLOTS = 12
"""The growth within an hour (12 slots of 5 minutes) is covered. After that, an operator or the
next day's buffer can react."""
GROWTH_SHARE = 0.99
"""Share of the hours whose growth the buffer covers."""


@dataclass(frozen=True, slots=True)
class OwnerUse:
    """The use of one pool that determines its buffers."""

    by_msb: Mapping[str, int]
    """Machines with tasks."""
    surge: Sequence[float] = ()
    """For each job, how many machines its extra tasks take during an update."""
    history: UseHistory | None = field(default=None)

    @property
    def used(self) -> int:
        """Return how many machines have tasks."""
        return sum(self.by_msb.values())


def buffers(owners: Sequence[OwnerUse]) -> Buffers:
    """Return the buffers of a region, and what each owner would need separately."""
    kinds = [_fault(owners), _maintenance(owners), _release(owners), _growth(owners)]
    used = sum(owner.used for owner in owners)
    central, siloed = sum(k.central for k in kinds), sum(k.siloed for k in kinds)
    gain = used / (used + central) - used / (used + siloed) if used else 0.0
    return Buffers(buffers=kinds, used=used, central=central, siloed=siloed, gain=round(gain, 4))


def _fault(owners: Sequence[OwnerUse]) -> Buffer:
    region = Counter[str]()
    for owner in owners:
        region.update(owner.by_msb)
    msb, central = max(region.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    siloed = sum(max(owner.by_msb.values(), default=0) for owner in owners)
    why = f"MSB {msb} has {central} machines with tasks, the most; {len(owners)} owners lose up to"
    return Buffer(
        kind="fault", central=central, siloed=siloed, why=f"{why} {siloed} in their largest MSB"
    )


def _maintenance(owners: Sequence[OwnerUse]) -> Buffer:
    used = sum(owner.used for owner in owners)
    central = ceil(MAINTENANCE_SHARE * used)
    siloed = sum(ceil(MAINTENANCE_SHARE * owner.used) for owner in owners)
    why = f"{MAINTENANCE_SHARE:.0%} of {used} machines are away at once, rounded up by owner"
    return Buffer(kind="maintenance", central=central, siloed=siloed, why=why)


def _release(owners: Sequence[OwnerUse]) -> Buffer:
    largest = sorted((max(owner.surge, default=0.0) for owner in owners), reverse=True)
    central = ceil(sum(largest[:RELEASES_AT_ONCE]))
    siloed = sum(map(ceil, largest))
    many = min(len(largest), RELEASES_AT_ONCE)
    why = f"extra tasks of the largest update of each owner, {many} of {len(largest)} at once"
    return Buffer(kind="release", central=central, siloed=siloed, why=why)


def _growth(owners: Sequence[OwnerUse]) -> Buffer:
    parts = [growth_by_slot(o.history, GROWTH_SLOTS) for o in owners if o.history is not None]
    central = ceil(quantile(sum_by_slot(parts), GROWTH_SHARE))
    siloed = sum(ceil(quantile([*map(float, p.values())], GROWTH_SHARE)) for p in parts)
    slots = len({number for part in parts for number in part})
    why = (
        f"in {GROWTH_SHARE:.0%} of {slots} periods of an hour the growth was at most "
        f"{central} machines"
    )
    return Buffer(kind="growth", central=central, siloed=siloed, why=why)
