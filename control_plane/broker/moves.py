"""Moves free machines between brokers; listeners get each move as one change.

A move writes the machine at its new broker before it deletes it at the old one, perhaps in another
store. A crash in between leaves the machine at both brokers, and a stored note of the move. The
next load keeps the record with the higher generation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from control_plane.api.machines import MachineRecord
from control_plane.broker.broker import Broker
from control_plane.broker.core.assignment import not_free
from control_plane.runtime.table import pages
from control_plane.store import Delete, Put, Store
from wire.errors import Conflict

log = logging.getLogger(__name__)
_MOVES = "machine-moves/"
"""Records of machines that may be at two brokers."""
OnMachineChange = Callable[[str, MachineRecord | None, MachineRecord | None], None]
"""Called with the name of a machine and its record before and after a change."""


class Moves:
    """Machines that move, and the filter that turns their steps into one change."""

    def __init__(
        self,
        by_datacenter: Mapping[str, Broker],
        stores: Sequence[Store],
        is_followed: Callable[[], bool],
        report: OnMachineChange,
    ) -> None:
        """`is_followed` returns whether other processes write machines; `report` gets changes."""
        self._by_datacenter, self._stores = by_datacenter, stores
        self._is_followed, self._report = is_followed, report
        self._moving: set[str] = set()
        """Machines that are being moved: steps of the move are not reported."""
        self._doubled: set[str] = set()
        """Machines that two brokers may have because a move was interrupted."""
        self._reported: dict[str, MachineRecord] = {}
        """Machine at two brokers → the record reported last: the one that will stay."""

    @property
    def any_doubled(self) -> bool:
        """Return whether any machine may be at two brokers."""
        return bool(self._doubled)

    async def load(self) -> None:
        """Read the notes of interrupted moves."""
        for store in self._stores:
            async for page in pages(store, _MOVES):
                self._doubled |= {entry.key.removeprefix(_MOVES) for entry in page}

    async def move(self, name: str, home: Broker, target: Broker) -> None:
        """Move a free machine to another broker; `Conflict` if it is taken."""
        async with home.table.lock(name), target.table.lock(name):
            record = home.table.get(name)
            if why := not_free(record):
                raise Conflict(
                    f"cannot move machine {name!r} from {home.datacenter} to {target.datacenter}:"
                    f" it {why}",
                    hint="a machine moves to another data center only while it is free",
                )
            moved = replace(
                record,
                location=replace(record.location, datacenter=target.datacenter),
                assignment_generation=record.assignment_generation + 1,
            )
            self._moving.add(name)
            self._doubled.add(name)
            self._reported[name] = record
            try:
                await target.table.commit(name, moved, also=[Put(_MOVES + name, b"")])
                await home.table.commit(name, None)
            finally:
                self._moving.discard(name)
                self._report_doubled(name)
            self._settled(name)
            await target.table.store.txn({}, [Delete(_MOVES + name)])
        log.info("machine moved", extra={"machine": name, "datacenter": target.datacenter})

    async def settle(self) -> None:
        """Finish interrupted moves: the machine stays where its generation is higher."""
        for broker in self._by_datacenter.values():
            await broker.table.settle()
        for name in sorted(self._doubled):
            homes = [b for b in self._by_datacenter.values() if name in b.table]
            homes.sort(key=lambda b: b.table.get(name).assignment_generation)
            for stale in homes[:-1]:
                self._moving.add(name)
                try:
                    async with stale.table.lock(name):
                        await stale.table.commit(name, None)
                finally:
                    self._moving.discard(name)
            for store in self._stores:
                if await store.get(_MOVES + name) is not None:
                    await store.txn({}, [Delete(_MOVES + name)])
            self._settled(name)

    def on_change(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Report a change at one broker, unless it is a step of a move."""
        if name in self._moving:
            return
        if name in self._doubled:
            self._report_doubled(name)
        elif self._is_followed() and (before is None) is not (after is None):
            self._report_followed_move(name, before, after)
        else:
            self._report(name, before, after)

    def _settled(self, name: str) -> None:
        """Record that at most one broker has a machine."""
        self._doubled.discard(name)
        self._reported.pop(name, None)

    def _report_followed_move(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Report the move of a machine by another process to another data center as one change.

        The new record appears before the old one is deleted.
        """
        records = [b.table.get(name) for b in self._by_datacenter.values() if name in b.table]
        if after is None:
            self._report(name, before, records[0] if records else None)
        elif len(records) == 1:
            self._report(name, None, after)

    def _report_doubled(self, name: str) -> None:
        """Report a machine that may be at two brokers, with the record that will stay."""
        known = [b.table.get(name) for b in self._by_datacenter.values() if name in b.table]
        after = max(known, key=lambda record: record.assignment_generation, default=None)
        before = self._reported.pop(name, None)
        if after is not None:
            self._reported[name] = after
        if after is not before:
            self._report(name, before, after)
