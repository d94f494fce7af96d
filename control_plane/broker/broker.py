"""The resource broker of one data center: stores its machines, their owners and their state.

A machine is free or in exactly one entitlement (MO9): one field of one record, which changes only
by compare-and-set. `brokers` combines the brokers of a region.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import msgspec

from agent.api.joining import JoinRequest
from control_plane.api.machine_commands import MachineCommand
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.assignment import not_free, not_releasable, released
from control_plane.broker.core.commands import carried_out
from control_plane.broker.core.inventory import joined_record
from control_plane.broker.core.unavailability import removable
from control_plane.broker.holds import Holds, refused
from control_plane.broker.keys import prefix_of
from control_plane.broker.reader import MachineReader
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.store import Store
from wire.errors import Conflict, FieldError

log = logging.getLogger(__name__)
_HISTORY = 10_000
"""Changes that a subscriber may be behind before it must list again."""
Machines = list[MachineRecord]


class Broker:
    """Owner of the records of all machines in one data center (RB1)."""

    def __init__(self, store: Store, runtime: Runtime, datacenter: str, writer: str = "") -> None:
        """`writer` is the name of this process, see `Brokers`."""
        self.datacenter = datacenter
        self._reader = MachineReader()
        self.table: Table[MachineRecord] = Table(
            store,
            prefix_of(datacenter),
            MachineRecord,
            "machine",
            read=self._reader.read,
            history=_HISTORY,
            checkpoint=runtime.checkpoint,
            writer=writer,
        )
        self._runtime = runtime
        self._held: dict[str, dict[str, None]] = defaultdict(dict)
        """Names by entitlement. Sets would do, but the garbage collector walks through sets."""
        self.holds = Holds(self.table, runtime)
        self.table.listen(self._index, self._index_all)

    async def load(self) -> None:
        """Read all machines; see `Table.load`."""
        await self.table.load()
        self._reader.forget_text()

    # -- finding

    def held(self, entitlement: str) -> Machines:
        """Return the machines of an entitlement; of the free pool for `FREE`."""
        return [self.table.get(name) for name in sorted(self._held.get(entitlement, ()))]

    def names_held(self, entitlement: str) -> Collection[str]:
        """Return the names of the machines of an entitlement, in no order."""
        return self._held.get(entitlement, ())

    def count(self, entitlement: str) -> int:
        """Return how many machines an entitlement has here."""
        return len(self._held.get(entitlement, ()))

    # -- adding and removing

    async def join(self, request: JoinRequest) -> MachineRecord:
        """Record a machine; a known one was reinstalled and keeps its assignment."""
        async with self.table.lock(request.machine):
            known = self.table.find(request.machine)
            record = self._reader.shared(joined_record(known, request, self._runtime.date()))
            await self.table.commit(request.machine, record)
        log.info("machine joined", extra={"machine": request.machine, "known": known is not None})
        return record

    async def put_many(self, records: Mapping[str, MachineRecord]) -> None:
        """Add machines that are new here (RB10), all or none."""
        async with self.table.lock(*records):
            errors = [
                FieldError(field=name, reason="is already known")
                for name in records
                if name in self.table
            ]
            if errors:
                raise refused(f"add {len(records)} machines", errors)
            await self.table.commit_many(
                {name: self._reader.shared(record) for name, record in records.items()}
            )

    async def change_many(
        self, names: Collection[str], change: Callable[[MachineRecord], MachineRecord]
    ) -> Machines:
        """Change machines in one transaction; equal parts of their records are shared."""
        return await self.table.update_many(
            names,
            lambda before: (
                before if (after := change(before)) is before else self._reader.shared(after)
            ),
        )

    async def remove(self, machine: str) -> None:
        """Forget a free machine that is decommissioned or was replaced (RB11)."""
        async with self.table.lock(machine):
            record = self.table.get(machine)
            if why := not_free(record) or removable(record, self._runtime.date()):
                raise Conflict(
                    f"cannot remove machine {machine!r}: it {why}",
                    hint="twinectl machine drain --kind decommission, and wait until it is free",
                )
            await self.table.commit(machine, None)
        log.info("machine removed", extra={"machine": machine})

    # -- assignment

    async def release_many(self, machines: Mapping[str, int]) -> Machines:
        """Free several machines in one transaction, unless one changed since its revision."""
        async with self.table.lock(*machines):
            now, freed = self._runtime.date(), []
            changes: dict[str, MachineRecord | None] = {}
            for name, revision in machines.items():
                record = self.table.get(name)
                why = not_releasable(record)
                if self.table.revision(name) != revision:
                    why = "was changed by another request"
                if why:
                    raise Conflict(f"cannot reassign machine {name!r}: it {why}")
                changes[name] = free = released(record, now)
                freed.append(free)
                fields = {"machine": name, "entitlement": record.entitlement}
                log.info("machine released", extra=fields)
            await self.table.commit_many(changes)
        return freed

    # -- state

    async def carry_out(
        self, commands: Mapping[str, MachineCommand], revisions: Mapping[str, int] | None = None
    ) -> Machines:
        """Carry out a command for each of these machines, in one transaction.

        With `revisions`, machines that changed since then are not changed.
        """
        async with self.table.lock(*commands):
            now, changes = self._runtime.date(), dict[str, MachineRecord | None]()
            for name, command in commands.items():
                before = self.table.get(name)
                if revisions is not None and self.table.revision(name) != revisions[name]:
                    continue
                after = carried_out(before, command, now)
                if after != before:
                    changes[name] = self._reader.shared(after)
            if changes:
                await self.table.commit_many(changes)
        for name in changes:
            command = msgspec.to_builtins(commands[name])
            fields = {key: command[key] for key in ("command", "reason") if key in command}
            log.info("machine command executed", extra={"machine": name, **fields})
        return [self.table.get(name) for name in commands]

    def _index(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        if before is not None and after is not None and before.entitlement == after.entitlement:
            return
        if before is not None:
            self._held[before.entitlement].pop(name, None)
        if after is not None:
            self._held[after.entitlement][name] = None

    def _index_all(self, records: Mapping[str, MachineRecord]) -> None:
        held = self._held
        for name, record in records.items():
            held[record.entitlement][name] = None
