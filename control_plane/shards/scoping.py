"""The scopes of a region's shards, and what they allow of its entitlements (docs/adr/0223)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import MachineRecord
from control_plane.runtime.table import Table
from control_plane.shards.core import scopes
from control_plane.shards.ownership import OwnershipMap


class ShardScopes:
    """Checks each change of an owner and of a pin; a transaction compares what it was based on."""

    def __init__(
        self,
        regions: Mapping[str, str],
        ownership: OwnershipMap,
        entitlements: Table[EntitlementRecord],
        held: Callable[[str], Iterable[MachineRecord]],
    ) -> None:
        """`regions` are those of `SchedulerSettings.shard_regions`; `held` the machines of one."""
        self._regions, self._ownership, self._entitlements = regions, ownership, entitlements
        self._held = held

    def of(self, shard: int) -> str:
        """Return the region of a shard; empty: it is global."""
        return self._regions.get(str(shard), "")

    def pin_of(self, entitlement: str) -> str | None:
        """Return the region to which an entitlement is pinned; None: to none."""
        record = self._entitlements.find(entitlement)
        return record.spec.region if record is not None else None

    def check_owners(self) -> None:
        """Raise `ConfigError` if shards own entitlements that their scopes exclude."""
        if self._regions:
            pins = {
                record.name: record.spec.region
                for record in self._entitlements.records()
                if record.spec.materialization is None
            }
            owners = {name: self._ownership.shard_of(name) for name in pins}
            scopes.check_owners(owners, pins, self.of)

    def may_get(self, entitlement: str, shard: int) -> Mapping[str, int]:
        """Return comparisons that hold while a shard may get an entitlement; else `Conflict`."""
        if not (scope := self.of(shard)):
            return {}
        held = {record.machine: record.location.region for record in self._held(entitlement)}
        scopes.check_move(entitlement, self.pin_of(entitlement), shard, scope, held)
        return self._entitlements.expect([entitlement])

    def may_become(self, entitlement: str, spec: EntitlementSpec) -> Mapping[str, int]:
        """Return comparisons that hold while the shard of an entitlement may keep it as `spec`.

        Raises `Conflict` if it may not. A reservation is in the shard of its base.
        """
        if spec.materialization is not None or not self._regions:
            return {}
        known = self._entitlements.find(entitlement)
        may_move = known is not None and known.spec.materialization is None
        shard = self._ownership.shard_of(entitlement)
        scopes.check_pin(entitlement, spec.region, shard, self.of(shard), may_move=may_move)
        return self._ownership.table.expect([entitlement])
