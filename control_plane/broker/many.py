"""Changes many machines in short steps, and follows the writes of other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from control_plane.api.machines import MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.broker.keys import datacenter_of, survey
from control_plane.runtime.table import PART
from control_plane.store import KeyChange, Store


async def change_each(
    brokers: Brokers,
    machines: Collection[str],
    change: Callable[[MachineRecord], MachineRecord],
) -> list[MachineRecord]:
    """Change each machine, and return all by name; if a part fails, earlier changes stay."""
    changed: list[MachineRecord] = []
    for broker, names in brokers.split(sorted(set(machines))).items():
        for first in range(0, len(names), PART):
            changed += await broker.change_many(names[first : first + PART], change)
            await asyncio.sleep(0)
    return sorted(changed, key=lambda record: record.machine)


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
        for datacenter in sorted(await survey(self._store) | known):
            await self._brokers.at(datacenter).table.list_again()
