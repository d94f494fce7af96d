"""Checks that shards own only entitlements that their scopes permit (docs/adr/0223)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import MachineRecord
from control_plane.runtime.table import Table
from control_plane.shards.core import scopes
from control_plane.shards.ownership import OwnershipMap


class ShardScopes:
    """Checks each change of an owner or a pin; returns what the transaction must compare."""

    def __init__(
        self,
        regions: Mapping[str, str],
        ownership: OwnershipMap,
        entitlements: Table[EntitlementRecord],
        held: Callable[[str], Iterable[MachineRecord]],
    ) -> None:
        """`regions` is `SchedulerSettings.shard_regions`; `held` returns the machines of one."""
        self._regions, self._ownership, self._entitlements = regions, ownership, entitlements
        self._held = held

    def region_of(self, shard: int) -> str:
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
            scopes.check_owners(owners, pins, self.region_of)

    def check_new_owner(self, entitlement: str, shard: int) -> Mapping[str, int]:
        """Return the comparisons with which a shard may get an entitlement, or raise `Conflict`."""
        if not (scope := self.region_of(shard)):
            return {}
        held = {record.machine: record.location.region for record in self._held(entitlement)}
        scopes.check_move(entitlement, self.pin_of(entitlement), shard, scope, held)
        return self._entitlements.expect([entitlement])

    def check_change(self, entitlement: str, spec: EntitlementSpec) -> Mapping[str, int]:
        """Return the comparisons with which an entitlement may become `spec` in its shard.

        Raises `Conflict` if it may not. A reservation is in the shard of its base.
        """
        if spec.materialization is not None or not self._regions:
            return {}
        known = self._entitlements.find(entitlement)
        may_move = known is not None and known.spec.materialization is None
        shard = self._ownership.shard_of(entitlement)
        scopes.check_pin(entitlement, spec.region, shard, self.region_of(shard), may_move=may_move)
        return self._ownership.table.expect([entitlement])
