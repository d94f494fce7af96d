"""Bounds the free machines that each pool may take between two sums of all promises (CP7).

The sums find one way to keep every promise: a number of machines of each class for each group of
pools, and some unpromised machines. A pool that takes machines meant for its group, or unpromised
ones, does not affect the others. So such takes need no new sums. Any other change makes the ledger
invalid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.grants import MachineClass, Shares

Moves = Mapping[tuple[str, MachineClass], int]
"""Pool and class → change of the number of machines."""


class PromiseLedger:
    """One way to keep all promises, updated when machines change pools."""

    def __init__(self, shares: Shares) -> None:
        """Begin with the result of the sums."""
        self._shares = shares
        self.is_valid = True
        """Whether all changes since then could be recorded."""

    @property
    def keeps_all(self) -> bool:
        """Return whether every promise is kept after all changes so far."""
        return self.is_valid and not self._shares.unmet

    def limits(self, pool: str) -> dict[MachineClass, int]:
        """Return how many free machines of each class a pool may take at once."""
        found = dict.fromkeys(self._shares.rest, 0)
        if not self.is_valid:
            return found
        for kind, count in self._shares.rest.items():
            found[kind] = count
        for group in self._shares.groups.get(pool, ()):
            for kind, count in self._shares.flows[group].items():
                found[kind] = found.get(kind, 0) + count
        return found

    def record_moves(self, moves: Moves) -> None:
        """Record machines that changed pools, came to the region or left it."""
        balance: Counter[MachineClass] = Counter()
        for (pool, kind), by in moves.items():
            balance[kind] += by
            if pool != FREE and by < 0:
                self._give_back(pool, kind, -by)
        rest = self._shares.rest
        for kind, by in balance.items():
            rest[kind] = rest.get(kind, 0) + by
        for (pool, kind), by in moves.items():
            if pool != FREE and by > 0:
                self._take(pool, kind, by)
        more = any(by > 0 for by in balance.values()) or any(
            by < 0 for (pool, _), by in moves.items() if pool != FREE
        )
        if any(count < 0 for count in rest.values()) or (more and self._shares.unmet):
            self.is_valid = False

    def _take(self, pool: str, kind: MachineClass, count: int) -> None:
        for group in self._shares.groups.get(pool, ()):
            flow = self._shares.flows[group]
            meant = min(count, flow.get(kind, 0))
            if meant:
                flow[kind] -= meant
                count -= meant
        self._shares.rest[kind] = self._shares.rest.get(kind, 0) - count

    def _give_back(self, pool: str, kind: MachineClass, count: int) -> None:
        """Credit machines to a group of the pool that uses their class, else to no group."""
        for group in self._shares.groups.get(pool, ()):
            if kind in self._shares.flows[group]:
                self._shares.flows[group][kind] += count
                return
        self._shares.rest[kind] = self._shares.rest.get(kind, 0) + count
