"""The map from entitlements to shards, and the term that agents compare (docs/adr/0150).

The number of the term is the epoch of the map's store plus the number of moves of all entitlements.
So it rises with each new leader and with each move. A store without a map continues from the epochs
that hosts received before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from msgspec.structs import replace

from agent.api.term import OWNER_HEADER, OwnerTerm
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner, EntitlementRelease
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import Table
from control_plane.store import Delete, Put, Store
from control_plane.store.records import OWNERSHIPS, RELEASES, encode
from wire.errors import ConfigError

SHARDS_MAX = 64
"""Shards of one region (`SchedulerSettings.shards`)."""


class OwnershipMap:
    """The shard that owns each entitlement; the front end writes the map, all shards read it."""

    def __init__(self, store: Store) -> None:
        self.table: Table[EntitlementOwner] = Table(
            store, OWNERSHIPS, EntitlementOwner, "ownership"
        )
        self.find_machine: Callable[[str], MachineRecord | None] = lambda _: None
        """Returns the record of a machine, if there is one; `roles` sets it."""
        self._store = store
        self.moving: dict[str, int] = {}
        """Entitlement that is being moved → the shard that gets it; no shard owns it meanwhile."""
        self.epoch: Callable[[], int] = store.epoch
        """Returns the epoch of the region: with several processes the newest of any role."""
        self.is_ours: Callable[[int], bool] = lambda _shard: True
        """Returns whether this process runs a shard; `roles` sets it."""
        self._moves, self._shards = 0, SHARDS_MAX
        self.table.listen(self._owner_changed)

    async def load(self) -> None:
        """Read the map."""
        await self.table.load()

    def is_moving(self, entitlement: str) -> bool:
        """Return whether an entitlement is moving to another shard: no shard owns it meanwhile."""
        return self.moves_to(entitlement) is not None

    def moves_to(self, entitlement: str) -> int | None:
        """Return the shard that an entitlement is moving to; None: it is not moving."""
        record = self.table.find(entitlement)
        known = record.moving_to if record is not None else None
        return self.moving.get(entitlement, known)

    def _owner_changed(
        self, _: str, __: EntitlementOwner | None, after: EntitlementOwner | None
    ) -> None:
        if after is not None:
            self._moves = max(self._moves, after.moved)

    def shard_of(self, entitlement: str) -> int:
        """Return the shard that owns an entitlement."""
        record = self.table.find(entitlement)
        return 0 if record is None or record.shard >= self._shards else record.shard

    def check(
        self, shards: int, entitlements: Container[str], *, are_processes: bool = False
    ) -> None:
        """Raise `ConfigError` if entitlements are in a shard that does not run.

        A deleted entitlement does not count: if it is created again, shard 0 owns it. Shards that
        are processes may start later: their entries in the map are kept before they are known.
        """
        self._shards = SHARDS_MAX if are_processes else shards
        later = (r.entitlement for r in self.table.values() if r.shard >= shards)
        away = sorted(name for name in later if name in entitlements)
        if away:
            raise ConfigError(
                f"cannot run with shards = {shards}: {len(away)} entitlements are in later ones,"
                f" {', '.join(away[:3])} for instance",
                hint="start with the same number of shards as before, and move them: "
                "twinectl shard move",
            )

    async def give(
        self, entitlement: str, shard: int, compare: Mapping[str, int] | None = None
    ) -> None:
        """Give an entitlement without an owner to a shard, if `compare` holds."""
        async with self.table.lock(entitlement):
            if self.table.find(entitlement) is None:
                owner = EntitlementOwner(entitlement=entitlement, shard=shard)
                await self.table.commit(entitlement, owner, compare)

    async def move(
        self, entitlement: str, shard: int, compare: Mapping[str, int] | None = None
    ) -> None:
        """Give an entitlement to another shard and raise the term, in one write: the commit point.

        Raises `Conflict` if `compare` does not hold. After another error the outcome may be
        unknown: `table.settle` finds out.
        """
        async with self.table.lock(entitlement):
            moved = EntitlementOwner(entitlement=entitlement, shard=shard, moved=self._moves + 1)
            also = [Delete(RELEASES + entitlement)]
            await self.table.commit(entitlement, moved, compare, also)

    async def announce(self, entitlement: str, to: int | None) -> None:
        """Announce the shard that an entitlement is to move to; None withdraws the move."""
        async with self.table.lock(entitlement):
            known = self.table.find(entitlement) or EntitlementOwner(entitlement=entitlement)
            if known.moving_to != to:
                also = [Delete(RELEASES + entitlement)]
                await self.table.commit(entitlement, replace(known, moving_to=to), also=also)

    async def release(self, entitlement: str) -> None:
        """Store that this process stopped work in an entitlement; `Conflict` if it stays."""
        record = EntitlementRelease(entitlement=entitlement)
        put = Put(RELEASES + entitlement, encode(record))
        await self._store.txn(self.table.expect([entitlement]), [put])

    async def is_released(self, entitlement: str) -> bool:
        """Return whether the process of its shard has stopped work in an entitlement."""
        return await self._store.get(RELEASES + entitlement) is not None

    def number(self) -> int:
        """Return the number of the term under which this process owns entitlements."""
        return self.epoch() + self._moves

    def headers(self, machine: str) -> Mapping[str, str]:
        """Return the ownership header of a request to a machine; empty for a free one.

        A process that does not run the shard of the entitlement sends 0, and hosts change nothing.
        """
        record = self.find_machine(machine)
        if record is None or record.entitlement == FREE:
            return {}
        number = self.number() if self.is_ours(self.shard_of(record.entitlement)) else 0
        return {OWNER_HEADER: OwnerTerm(record.entitlement, number).text()}
