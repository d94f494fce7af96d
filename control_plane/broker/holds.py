"""The broker's part of a two-phase commit: machines held for an undecided allocation.

An allocation that takes machines of several brokers first prepares at each of them, then stores its
decision, then commits or aborts. A crash in between leaves holds, which the coordinator finds with
`in_doubt` and settles by its stored decision (AL12).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from control_plane.api.machines import Hold, MachineRecord
from control_plane.broker.core.assignment import assigned, not_holdable
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from wire.errors import Conflict, FieldError

log = logging.getLogger(__name__)
_NAMED = 5
"""Machines named in the text of an error; its list has all of them."""


@dataclass(frozen=True, slots=True)
class Take:
    """The entitlement that a machine will belong to, and the profile that it will run there."""

    entitlement: str
    profile: str


class Holds:
    """Participant in two-phase commits over the machines of one broker."""

    def __init__(self, table: Table[MachineRecord], runtime: Runtime) -> None:
        self._table = table
        self._runtime = runtime
        self._of: dict[str, set[str]] = defaultdict(set)
        self._tried: dict[str, tuple[str, ...]] = {}
        """Transaction → machines that it may hold: the write of their holds got no answer."""
        table.listen(self._index, self._index_all)

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        """Hold all these machines, or none and raise `Conflict` naming each that is not free.

        A repetition succeeds. After any other error some may be held: call `abort`.
        """
        async with self._table.lock(*takes):
            now = self._runtime.date()
            errors, holds = [], dict[str, MachineRecord | None]()
            for name, take in sorted(takes.items()):
                record = self._table.find(name)
                if record is not None and _is_same(record.hold, transaction, take):
                    continue
                why = not_holdable(record, now) if record is not None else "is not known"
                if why or record is None:
                    errors.append(FieldError(field=name, reason=why))
                    continue
                hold = Hold(
                    transaction=transaction,
                    entitlement=take.entitlement,
                    profile=take.profile,
                    since=now,
                )
                holds[name] = replace(record, hold=hold)
            if errors:
                raise refused(f"hold {len(takes)} machines for {transaction}", errors)
            if holds:
                self._tried[transaction] = tuple(holds)  # until `abort`, should this fail
                await self._table.commit_in_parts(holds)
                del self._tried[transaction]

    async def commit(self, transaction: str) -> list[MachineRecord]:
        """Turn all holds of a transaction into assignments; does nothing without holds."""
        names = self.of(transaction)
        if not names:
            return []

        def change(record: MachineRecord, hold: Hold) -> MachineRecord:
            return assigned(record, hold.entitlement, hold.profile, self._runtime.date())

        done = await self._end(transaction, names, change)
        log.info("machines assigned", extra={"transaction": transaction, "machines": len(done)})
        return done

    async def abort(self, transaction: str) -> None:
        """Remove all holds of a transaction, including holds whose write got no answer.

        Does nothing without holds.
        """
        names = sorted({*self.of(transaction), *self._tried.get(transaction, ())})
        if names:
            await self._end(transaction, names, lambda record, _: replace(record, hold=None))
            self._tried.pop(transaction, None)

    def of(self, transaction: str) -> list[str]:
        """Return the machines that a transaction holds."""
        return sorted(self._of.get(transaction, ()))

    def in_doubt(self) -> dict[str, list[str]]:
        """Return the transactions that hold machines now, with the names of these."""
        return {transaction: sorted(names) for transaction, names in sorted(self._of.items())}

    async def _end(
        self,
        transaction: str,
        names: Collection[str],
        change: Callable[[MachineRecord, Hold], MachineRecord],
    ) -> list[MachineRecord]:
        """Store and return the changed records of those machines that a transaction holds."""
        changes: dict[str, MachineRecord] = {}
        async with self._table.lock(*names):  # reads the outcome of a write without an answer
            for name in names:
                record = self._table.find(name)
                hold = record.hold if record is not None else None
                if record is not None and hold is not None and hold.transaction == transaction:
                    changes[name] = change(record, hold)
            if changes:
                await self._table.commit_in_parts(changes)
        return list(changes.values())

    def _index(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        was = before.hold if before is not None else None
        now = after.hold if after is not None else None
        if was is not None:
            machines = self._of[was.transaction]
            machines.discard(name)
            if not machines:
                del self._of[was.transaction]
        if now is not None:
            self._of[now.transaction].add(name)

    def _index_all(self, records: Mapping[str, MachineRecord]) -> None:
        for name, record in records.items():
            if record.hold is not None:
                self._index(name, None, record)


def refused(what: str, errors: list[FieldError]) -> Conflict:
    """Return the error of a change that some machines prevent; it lists all of them."""
    first = "; ".join(f"{e.field} {e.reason}" for e in errors[:_NAMED])
    more = f"; and {len(errors) - _NAMED} more" if len(errors) > _NAMED else ""
    return Conflict(f"cannot {what}: {first}{more}", errors=tuple(errors))


def _is_same(hold: Hold | None, transaction: str, take: Take) -> bool:
    if hold is None or hold.transaction != transaction:
        return False
    return (hold.entitlement, hold.profile) == (take.entitlement, take.profile)
