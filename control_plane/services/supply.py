"""How many machines of which class the region has, counted as the broker's records change."""

from __future__ import annotations

from collections import Counter

from control_plane.api.machines import MachineRecord
from control_plane.core.grants import MachineClass, Supply, class_of


class SupplyIndex:
    """Listens to the broker; a grant is checked against it without reading all machines."""

    def __init__(self) -> None:
        """Start with no machines; the broker tells of each when it is loaded."""
        self._counts: Counter[MachineClass] = Counter()

    def heard(self, _: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        """Follow the change of one machine."""
        was = None if before is None else class_of(before)
        now = None if after is None else class_of(after)
        if was == now:
            return
        if now is not None:
            self._counts[now] += 1
        if was is not None:
            self._counts[was] -= 1
            if not self._counts[was]:
                del self._counts[was]

    def counts(self) -> Supply:
        """Return the machines of each class; empty where the region has none yet."""
        return self._counts
