"""The resource broker: which machines there are, to whom they belong, and how they do.

A machine is free or in exactly one entitlement (MO9): both are one field of one record,
which only changes by compare-and-set.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from msgspec.structs import replace

from agent.api import JoinRequest, MachineFacts, ProfileState, ProfileStatus
from agent.errors import Conflict
from control_plane.api.machines import (
    EventKind,
    MachineRecord,
    MachineState,
    UnavailabilityEvent,
)
from control_plane.services.agents import Clock
from control_plane.services.table import Table
from control_plane.store import Store
from control_plane.store.records import MACHINES

log = logging.getLogger(__name__)
_EVENTS_KEPT = 20
FREE = ""


class Broker:
    """Owner of all machine records."""

    def __init__(self, store: Store, clock: Clock) -> None:
        """Load nothing yet."""
        self.table: Table[MachineRecord] = Table(store, MACHINES, MachineRecord, "machine")
        self._clock = clock
        self._held: dict[str, set[str]] = defaultdict(set)
        self.table.listen(self._index)

    async def load(self) -> None:
        """Read all machines."""
        await self.table.load()

    def listen(
        self, heard: Callable[[str, MachineRecord | None, MachineRecord | None], None]
    ) -> None:
        """Call `heard(machine, before, after)` after each change (RB4)."""
        self.table.listen(heard)

    def held(self, entitlement: str) -> list[MachineRecord]:
        """Return the machines of an entitlement; of the free pool for `FREE`."""
        return [self.table.get(name) for name in sorted(self._held[entitlement])]

    async def join(self, request: JoinRequest) -> MachineRecord:
        """Record a machine; one that is known keeps its assignment (it was reinstalled)."""
        async with self.table.lock(request.machine):
            known = self.table.find(request.machine)
            record = MachineRecord(
                machine=request.machine,
                location=request.location,
                machine_type=request.machine_type,
                address=request.address,
                facts=request.facts,
                joined_at=self._clock(),
            )
            if known is not None:
                record = replace(
                    known,
                    location=request.location,
                    machine_type=request.machine_type,
                    address=request.address,
                    facts=request.facts,
                )
            await self.table.commit(request.machine, record)
        log.info("machine joined", extra={"machine": request.machine, "known": known is not None})
        return record

    async def assign(
        self, machine: str, entitlement: str, profile: str, *, revision: int
    ) -> MachineRecord:
        """Give a free machine to an entitlement, unless anything changed since `revision`."""
        async with self.table.lock(machine):
            record = self.table.get(machine)
            self._require(machine, revision, record.entitlement == FREE)
            record = replace(
                record,
                entitlement=entitlement,
                assignment_generation=record.assignment_generation + 1,
                profile_wanted=profile,
                profile_state=ProfileState.NONE,
                profile_detail="",
            )
            await self.table.commit(machine, record)
        log.info("machine assigned", extra={"machine": machine, "entitlement": entitlement})
        return record

    async def release(self, machine: str, *, revision: int) -> MachineRecord:
        """Give a machine back to the free pool, unless anything changed since `revision`."""
        async with self.table.lock(machine):
            record = self.table.get(machine)
            self._require(machine, revision, record.entitlement != FREE)
            entitlement = record.entitlement
            record = replace(record, entitlement=FREE, profile_wanted="")
            await self.table.commit(machine, record)
        log.info("machine released", extra={"machine": machine, "entitlement": entitlement})
        return record

    async def quarantine(self, machine: str, reason: str, until: float) -> None:
        """Free a machine that cannot reach its profile, and keep it from that profile."""

        def change(record: MachineRecord) -> MachineRecord:
            return replace(
                self._ended(record, EventKind.PLANNED),
                entitlement=FREE,
                profile_wanted="",
                quarantined_profile=record.profile_wanted,
                quarantined_until=until,
                quarantine_reason=reason,
                profile_state=ProfileState.DEGRADED,
                profile_detail=reason,
            )

        await self.table.update(machine, change)
        log.warning("machine quarantined", extra={"machine": machine, "reason": reason})

    async def raise_generation(self, machine: str, above: int) -> None:
        """Let the machine be asked for its profile once more, as a new request."""
        await self.table.update(
            machine,
            lambda r: replace(r, assignment_generation=max(r.assignment_generation, above) + 1),
        )

    async def profile_seen(self, machine: str, seen: ProfileStatus) -> None:
        """Record what the agent proved about its profile; ends an expected reboot."""

        def change(record: MachineRecord) -> MachineRecord:
            record = replace(record, profile_state=seen.state, profile_detail=seen.detail)
            if seen.state is not ProfileState.VERIFIED:
                return record
            record = replace(record, profile=seen.name)
            return self._ended(record, EventKind.PLANNED)

        await self.table.update(machine, change)

    async def facts_seen(self, machine: str, facts: MachineFacts) -> None:
        """Record what the machine has, as its agent says."""
        await self.table.update(machine, lambda r: replace(r, facts=facts))

    async def mark_down(self, machine: str, reason: str) -> None:
        """Record a failure (RB3)."""
        await self.table.update(
            machine, lambda r: self._began(r, EventKind.FAILURE, reason, None, MachineState.DOWN)
        )
        log.warning("machine down", extra={"machine": machine, "reason": reason})

    async def mark_up(self, machine: str) -> None:
        """Record the end of a failure."""
        await self.table.update(
            machine,
            lambda r: replace(self._ended(r, EventKind.FAILURE), state=MachineState.UP),
        )
        log.info("machine up", extra={"machine": machine})

    async def expect_reboot(self, machine: str, reason: str, deadline: float) -> None:
        """Record that the machine will be away on purpose until a deadline at most."""
        await self.table.update(
            machine,
            lambda r: (
                r
                if open_event(r, EventKind.PLANNED)
                else self._began(r, EventKind.PLANNED, reason, deadline, r.state)
            ),
        )

    def _began(
        self,
        record: MachineRecord,
        kind: EventKind,
        reason: str,
        deadline: float | None,
        state: MachineState,
    ) -> MachineRecord:
        now = self._clock()
        event = UnavailabilityEvent(
            event_id=f"{record.machine}-{kind}-{now:.3f}",
            kind=kind,
            reason=reason,
            start=now,
            deadline=deadline,
        )
        kept = record.unavailability[-_EVENTS_KEPT:]
        return replace(record, state=state, unavailability=(*kept, event))

    def _ended(self, record: MachineRecord, kind: EventKind) -> MachineRecord:
        now = self._clock()
        events = tuple(
            replace(e, end=now) if e.kind is kind and e.end is None else e
            for e in record.unavailability
        )
        return replace(record, unavailability=events)

    def _require(self, machine: str, revision: int, as_expected: bool) -> None:
        if self.table.revision(machine) != revision or not as_expected:
            raise Conflict(f"cannot reassign machine {machine!r}: it was changed meanwhile")

    def _index(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        if before is not None:
            self._held[before.entitlement].discard(name)
        if after is not None:
            self._held[after.entitlement].add(name)


def open_event(record: MachineRecord, kind: EventKind) -> UnavailabilityEvent | None:
    """Return the event of a kind that has not ended."""
    for event in record.unavailability:
        if event.kind is kind and event.end is None:
            return event
    return None
