"""The resource broker of one data center: its machines, to whom they belong, how they do.

A machine is free or in exactly one entitlement (MO9): both are one field of one record,
which only changes by compare-and-set. `brokers` makes one region of several.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from msgspec.structs import replace

from agent.api import JoinRequest, MachineFacts, ProfileState, ProfileStatus
from control_plane.api.inventory import MachineChange
from control_plane.api.machines import (
    EventKind,
    MachineRecord,
    MachineState,
    UnavailabilityEvent,
)
from control_plane.broker.core.assignment import (
    FREE,
    assigned,
    not_releasable,
    released,
    taken,
)
from control_plane.broker.core.inventory import completed
from control_plane.broker.core.unavailability import began, ended, open_event, removable
from control_plane.broker.holds import Holds, Take, refused
from control_plane.broker.keys import prefix_of
from control_plane.broker.reader import MachineReader
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Heard, Loaded, Table
from control_plane.store import Store
from wire.errors import Conflict, FieldError

__all__ = ["FREE", "HISTORY", "Broker", "Take"]

log = logging.getLogger(__name__)
HISTORY = 10_000
"""Changes that a subscriber may be behind before it must list again."""
Machines = list[MachineRecord]
Names = list[str]


class Broker:
    """Owner of the records of all machines in one data center (RB1)."""

    def __init__(self, store: Store, runtime: Runtime, datacenter: str, writer: str = "") -> None:
        """Load nothing yet; `writer` is the name of this process, see `Brokers`."""
        self.datacenter = datacenter
        self._reader = MachineReader()
        self.table: Table[MachineRecord] = Table(
            store,
            prefix_of(datacenter),
            MachineRecord,
            "machine",
            read=self._reader.read,
            history=HISTORY,
            checkpoint=runtime.checkpoint,
            writer=writer,
        )
        self._runtime = runtime
        self._held: dict[str, dict[str, None]] = defaultdict(dict)
        """Names by entitlement. Sets would do, but the garbage collector walks through sets."""
        self._holds = Holds(self.table, runtime)
        self.table.listen(self._index, self._index_all)

    async def load(self, after_page: Callable[[], None] | None = None) -> None:
        """Read all machines; see `Table.load`."""
        await self.table.load(after_page)
        self._reader.forget_text()

    # -- being told (RB4)

    def listen(
        self, heard: Heard[MachineRecord], loaded: Loaded[MachineRecord] | None = None
    ) -> None:
        """Call `heard(machine, before, after)` after each change; see `Table.listen`."""
        self.table.listen(heard, loaded)

    def list(self) -> tuple[int, Machines]:
        """Return all machines, by name, and the revision from which to watch them."""
        return self.table.latest, self.table.records()

    async def watch(self, after: int) -> AsyncIterator[MachineChange]:
        """Yield each change after a revision, for ever.

        Raises `Compacted` when it is too long ago, or of another life of this broker: list
        again.
        """
        async for name, record, revision in self.table.watch(after):
            yield MachineChange(name=name, record=record, revision=revision)

    def held(self, entitlement: str) -> Machines:
        """Return the machines of an entitlement; of the free pool for `FREE`."""
        return [self.table.get(name) for name in sorted(self._held.get(entitlement, ()))]

    def count(self, entitlement: str) -> int:
        """Return how many machines an entitlement has here."""
        return len(self._held.get(entitlement, ()))

    # -- coming and going

    async def join(self, request: JoinRequest) -> MachineRecord:
        """Record a machine; one that is known keeps its assignment (it was reinstalled)."""
        async with self.table.lock(request.machine):
            known = self.table.find(request.machine)
            record = self._reader.shared(completed(known, request, self._runtime.date()))
            await self.table.commit(request.machine, record)
        log.info("machine joined", extra={"machine": request.machine, "known": known is not None})
        return record

    async def put_many(self, records: Mapping[str, MachineRecord]) -> None:
        """Add machines that are new here (RB10), all or none."""
        async with self.table.lock(*records):
            errors = [
                FieldError(field=name, reason="is known already")
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
            if why := taken(record) or removable(record, self._runtime.date()):
                raise Conflict(
                    f"cannot remove machine {machine!r}: it {why}",
                    hint="twinectl machine drain --kind decommission, and wait until it is free",
                )
            await self.table.commit(machine, None)
        log.info("machine removed", extra={"machine": machine})

    # -- to whom they belong

    async def assign(
        self, machine: str, entitlement: str, profile: str, *, revision: int
    ) -> MachineRecord:
        """Give a free machine to an entitlement, unless anything changed since `revision`."""
        async with self.table.lock(machine):
            record = self.table.get(machine)
            self._require(machine, revision, taken(record))
            record = assigned(record, entitlement, profile, self._runtime.date())
            await self.table.commit(machine, record)
        log.info("machine assigned", extra={"machine": machine, "entitlement": entitlement})
        return record

    async def release(self, machine: str, *, revision: int) -> MachineRecord:
        """Give a machine back to the free pool, unless anything changed since `revision`."""
        return (await self.release_many({machine: revision}))[0]

    async def release_many(self, machines: Mapping[str, int]) -> Machines:
        """Free several in one transaction, unless any changed since its revision."""
        async with self.table.lock(*machines):
            now, freed = self._runtime.date(), []
            changes: dict[str, MachineRecord | None] = {}
            for name, revision in machines.items():
                record = self.table.get(name)
                self._require(name, revision, not_releasable(record))
                changes[name] = free = released(record, now)
                freed.append(free)
                fields = {"machine": name, "entitlement": record.entitlement}
                log.info("machine released", extra=fields)
            await self.table.commit_many(changes)
        return freed

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold free machines for a transaction, all or none; see `holds`."""
        await self._holds.prepare(transaction, takes)

    async def commit(self, transaction: str) -> Machines:
        """Assign what a transaction holds; again changes nothing."""
        return await self._holds.commit(transaction)

    async def abort(self, transaction: str) -> None:
        """Let go of what a transaction holds; again changes nothing."""
        await self._holds.abort(transaction)

    def in_doubt(self) -> dict[str, Names]:
        """Return each transaction that holds machines here, and which."""
        return self._holds.in_doubt()

    async def quarantine(self, machine: str, reason: str, until: float) -> None:
        """Free a machine that cannot reach its profile, and keep it from that profile.

        One that was lent goes to the free pool, too: it is of no use to its donor.
        """

        def change(record: MachineRecord) -> MachineRecord:
            now = self._runtime.date()
            return replace(
                released(ended(record, now, (EventKind.PLANNED,)), now),
                quarantined_profile=record.profile_wanted,
                quarantined_until=until,
                quarantine_reason=reason,
                profile_state=ProfileState.DEGRADED,
                profile_detail=reason,
            )

        await self.table.update(machine, change)
        log.warning("machine quarantined", extra={"machine": machine, "reason": reason})

    # -- how they do

    async def raise_generation(self, machine: str, above: int) -> None:
        """Let the machine be asked for its profile once more, as a new request."""
        await self.table.update(
            machine,
            lambda r: replace(r, assignment_generation=max(r.assignment_generation, above) + 1),
        )

    async def want_profile(self, machine: str, entitlement: str, profile: str) -> None:
        """Have a machine be brought to another profile, as long as it is the entitlement's."""

        def change(record: MachineRecord) -> MachineRecord:
            if record.entitlement != entitlement or record.profile_wanted == profile:
                return record
            return replace(
                record,
                assignment_generation=record.assignment_generation + 1,
                profile_wanted=profile,
                profile_state=ProfileState.NONE,
                profile_detail="",
            )

        await self.table.update(machine, change)
        log.info("another profile wanted", extra={"machine": machine, "profile": profile})

    async def profile_seen(self, machine: str, seen: ProfileStatus) -> None:
        """Record what the agent proved about its profile; ends an expected reboot."""

        def change(record: MachineRecord) -> MachineRecord:
            record = replace(record, profile_state=seen.state, profile_detail=seen.detail)
            if seen.state is not ProfileState.VERIFIED:
                return record
            record = replace(record, profile=seen.name)
            return ended(record, self._runtime.date(), (EventKind.PLANNED,))

        await self.table.update(machine, change)

    async def facts_seen(self, machine: str, facts: MachineFacts) -> None:
        """Record what the machine has, as its agent says."""
        await self.table.update(machine, lambda r: replace(r, facts=facts))

    async def mark_down(self, machine: str, reason: str) -> None:
        """Record a failure (RB3)."""

        def change(record: MachineRecord) -> MachineRecord:
            failed = self._event(record, EventKind.FAILURE, reason, None)
            return replace(failed, state=MachineState.DOWN)

        await self.table.update(machine, change)
        log.warning("machine down", extra={"machine": machine, "reason": reason})

    async def mark_up(self, machine: str) -> None:
        """Record the end of a failure."""

        def change(record: MachineRecord) -> MachineRecord:
            record = ended(record, self._runtime.date(), (EventKind.FAILURE,))
            return replace(record, state=MachineState.UP)

        await self.table.update(machine, change)
        log.info("machine up", extra={"machine": machine})

    async def expect_reboot(self, machine: str, reason: str, deadline: float) -> None:
        """Record that the machine will be away on purpose until a deadline at most."""

        def change(record: MachineRecord) -> MachineRecord:
            if open_event(record, EventKind.PLANNED):
                return record
            return self._event(record, EventKind.PLANNED, reason, deadline)

        await self.table.update(machine, change)

    def _event(
        self, record: MachineRecord, kind: EventKind, reason: str, deadline: float | None
    ) -> MachineRecord:
        now = self._runtime.date()
        event = UnavailabilityEvent(
            event_id=f"{record.machine}-{kind}-{now:.3f}",
            kind=kind,
            reason=reason,
            start=now,
            deadline=deadline,
        )
        return began(record, event)

    def _require(self, machine: str, revision: int, against: str) -> None:
        if self.table.revision(machine) != revision:
            raise Conflict(f"cannot reassign machine {machine!r}: it was changed meanwhile")
        if against:
            raise Conflict(f"cannot reassign machine {machine!r}: it {against}")

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
