"""The map from entitlements to shards, and the term that agents compare (docs/adr/0150).

The number of the term is the epoch of the store that the map is in, plus the moves of all
entitlements so far. So it rises with a new leader and with each move, and a store that has no map
yet goes on from the epochs that hosts were told before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from agent.api.term import OWNER_HEADER, OwnerTerm
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner, ShardLoad
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.records import OWNERSHIPS
from wire.errors import ConfigError

SHARDS_MAX = 64
"""Shards of one region (`SchedulerSettings.shards`)."""


class OwnershipMap:
    """Which shard owns each entitlement. The front end writes it; all shards read it."""

    def __init__(self, store: Store) -> None:
        """Load nothing yet."""
        self.table: Table[EntitlementOwner] = Table(
            store, OWNERSHIPS, EntitlementOwner, "ownership"
        )
        self.find_machine: Callable[[str], MachineRecord | None] = lambda _: None
        """Return the record of a machine, if there is one; `roles` says it."""
        self._store = store
        self.moving: dict[str, int] = {}
        """Entitlement that is being moved → the shard that gets it; no shard owns it meanwhile."""
        self._moves, self._shards = 0, SHARDS_MAX
        self.table.listen(self._heard)

    async def load(self) -> None:
        """Read the map."""
        await self.table.load()

    def _heard(self, _: str, __: EntitlementOwner | None, after: EntitlementOwner | None) -> None:
        if after is not None:
            self._moves = max(self._moves, after.moved)

    def shard_of(self, entitlement: str) -> int:
        """Return the shard that owns an entitlement."""
        record = self.table.find(entitlement)
        return 0 if record is None or record.shard >= self._shards else record.shard

    def check(self, shards: int, entitlements: Container[str]) -> None:
        """Raise `ConfigError` if entitlements are in a shard that does not run.

        One that is gone is shard 0's, should it come again: nothing uses it.
        """
        self._shards = shards
        later = (r.entitlement for r in self.table.values() if r.shard >= shards)
        away = sorted(name for name in later if name in entitlements)
        if away:
            raise ConfigError(
                f"cannot run with shards = {shards}: {len(away)} entitlements are in later ones,"
                f" {', '.join(away[:3])} for instance",
                hint="start with as many shards as before, and move them: twinectl shard move",
            )

    async def give(self, entitlement: str, shard: int) -> None:
        """Give an entitlement that nothing uses yet to a shard."""
        async with self.table.lock(entitlement):
            if self.table.find(entitlement) is None:
                await self.table.commit(
                    entitlement, EntitlementOwner(entitlement=entitlement, shard=shard)
                )

    async def move(self, entitlement: str, shard: int) -> None:
        """Give an entitlement to another shard, and raise the term: one write, the commit point.

        After an error it may have been made, or not: `table.settle` finds out.
        """
        async with self.table.lock(entitlement):
            moved = EntitlementOwner(entitlement=entitlement, shard=shard, moved=self._moves + 1)
            await self.table.commit(entitlement, moved)

    def number(self) -> int:
        """Return the number of the term in which this process owns what it owns."""
        return self._store.epoch() + self._moves

    def said(self, machine: str) -> Mapping[str, str]:
        """Return what a request to a machine says, by header; a free one has no owner."""
        record = self.find_machine(machine)
        if record is None or record.entitlement == FREE:
            return {}
        return {OWNER_HEADER: OwnerTerm(record.entitlement, self.number()).text()}


def least_loaded(loads: Sequence[ShardLoad]) -> int:
    """Return the shard with the fewest machines; of several, with the fewest jobs."""
    return min(loads, key=lambda of: (of.machines, of.jobs, of.shard)).shard
