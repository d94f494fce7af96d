"""The map from entitlements to shards, and the term that agents compare (docs/adr/0150).

The number of the term is the epoch of the store that the map is in, plus the moves of all
entitlements so far. So it rises with a new leader and with each move, and a store that has no map
yet goes on from the epochs that hosts were told before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from msgspec.structs import replace

from agent.api.term import OWNER_HEADER, OwnerTerm
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner, EntitlementRelease, ShardLoad
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import Table
from control_plane.store import Delete, Put, Store
from control_plane.store.records import OWNERSHIPS, RELEASES, encode
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
        self.epoch: Callable[[], int] = store.epoch
        """Return the epoch of the region: with several processes the newest of any role."""
        self.is_ours: Callable[[int], bool] = lambda _shard: True
        """Return whether this process runs a shard; `roles` says it."""
        self._moves, self._shards = 0, SHARDS_MAX
        self.table.listen(self._heard)

    async def load(self) -> None:
        """Read the map."""
        await self.table.load()

    def is_moving(self, entitlement: str) -> bool:
        """Return whether no shard owns an entitlement: it is on its way to another one."""
        return self.moves_to(entitlement) is not None

    def moves_to(self, entitlement: str) -> int | None:
        """Return the shard that an entitlement is on its way to; None: it is not."""
        record = self.table.find(entitlement)
        known = record.moving_to if record is not None else None
        return self.moving.get(entitlement, known)

    def _heard(self, _: str, __: EntitlementOwner | None, after: EntitlementOwner | None) -> None:
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

        One that is gone is shard 0's, should it come again: nothing uses it. Shards that are
        processes may come later: what the map says of them holds from before that is known.
        """
        self._shards = SHARDS_MAX if are_processes else shards
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
            await self.table.commit(entitlement, moved, also=[Delete(RELEASES + entitlement)])

    async def announce(self, entitlement: str, to: int | None) -> None:
        """Say to which shard an entitlement is going to move; None: it stays where it is."""
        async with self.table.lock(entitlement):
            known = self.table.find(entitlement) or EntitlementOwner(entitlement=entitlement)
            if known.moving_to != to:
                also = [Delete(RELEASES + entitlement)]
                await self.table.commit(entitlement, replace(known, moving_to=to), also=also)

    async def release(self, entitlement: str) -> None:
        """Say that this process does nothing more in an entitlement; `Conflict` if it stays."""
        record = EntitlementRelease(entitlement=entitlement)
        put = Put(RELEASES + entitlement, encode(record))
        await self._store.txn(self.table.expect([entitlement]), [put])

    async def is_released(self, entitlement: str) -> bool:
        """Return whether the process of its shard does nothing more in an entitlement."""
        return await self._store.get(RELEASES + entitlement) is not None

    def number(self) -> int:
        """Return the number of the term in which this process owns what it owns."""
        return self.epoch() + self._moves

    def said(self, machine: str) -> Mapping[str, str]:
        """Return what a request to a machine says, by header; a free one has no owner.

        A process that does not run the shard of the entitlement says 0: hosts change nothing.
        """
        record = self.find_machine(machine)
        if record is None or record.entitlement == FREE:
            return {}
        number = self.number() if self.is_ours(self.shard_of(record.entitlement)) else 0
        return {OWNER_HEADER: OwnerTerm(record.entitlement, number).text()}


def least_loaded_first(loads: Sequence[ShardLoad]) -> list[int]:
    """Return the shards by load, the least one first; of several, the one with the fewest jobs."""
    return [of.shard for of in sorted(loads, key=lambda of: (of.load, of.jobs, of.shard))]
