"""The map from entitlements to shards, and the term that agents compare (docs/adr/0150).

The number of the term is the epoch of the store that the map is in, plus the moves of all
entitlements so far. So it rises with a new leader and with each move, and a store that has no map
yet goes on from the epochs that hosts were told before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent.api.term import OWNER_HEADER, OwnerTerm
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import Ownership
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.records import OWNERSHIPS


class OwnershipMap:
    """Which shard owns each entitlement. The front end writes it, everybody reads it."""

    def __init__(self, store: Store) -> None:
        """Load nothing yet."""
        self.table: Table[Ownership] = Table(store, OWNERSHIPS, Ownership, "ownership")
        self.find_machine: Callable[[str], MachineRecord | None] = lambda _: None
        """Return the record of a machine, if there is one; whoever has them says so."""
        self._store = store
        self._moves = 0

    async def load(self) -> None:
        """Read the map."""
        await self.table.load()
        self._moves = max((record.moved for record in self.table.values()), default=0)

    def shard_of(self, entitlement: str) -> int:
        """Return the shard that owns an entitlement."""
        record = self.table.find(entitlement)
        return 0 if record is None else record.shard

    def number(self) -> int:
        """Return the number of the term in which this process owns what it owns."""
        return self._store.epoch() + self._moves

    def said(self, machine: str) -> Mapping[str, str]:
        """Return what a request to a machine says, by header; of a free one nobody is owner."""
        record = self.find_machine(machine)
        if record is None or record.entitlement == FREE:
            return {}
        return {OWNER_HEADER: OwnerTerm(record.entitlement, self.number()).text()}
