"""Follows the machines of a region that other processes write."""

from __future__ import annotations

from control_plane.broker.brokers import Brokers
from control_plane.broker.keys import datacenter_of, find_datacenters
from control_plane.store import KeyChange, Store


class FollowedMachines:
    """The machines of a region, some of them written by other processes (`runtime.following`)."""

    def __init__(self, brokers: Brokers, store: Store) -> None:
        self._brokers, self._store = brokers, store

    @property
    def is_followed(self) -> bool:
        """Return whether other processes write machines, too; see `Table`."""
        return self._brokers.is_followed

    @is_followed.setter
    def is_followed(self, value: bool) -> None:
        self._brokers.is_followed = value
        for broker in self._brokers.by_datacenter.values():
            broker.table.is_followed = value

    def concerns(self, key: str) -> bool:
        """Return whether a key is the key of a machine."""
        return bool(datacenter_of(key))

    async def follow(self, change: KeyChange) -> None:
        """Apply a change of a machine; see `Table.follow`."""
        await self._brokers.at(datacenter_of(change.key)).table.follow(change)

    async def complete(self) -> None:
        """Do nothing: `follow` has applied each change."""

    async def list_again(self) -> None:
        """Read all machines from the store again."""
        known = self._brokers.by_datacenter.keys()
        for datacenter in sorted(await find_datacenters(self._store) | known):
            await self._brokers.at(datacenter).table.list_again()
