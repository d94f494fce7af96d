"""Loans of whole machines: idle ones go to jobs that can return them quickly.

Off peak, an online service lends machines to offline work. At the next peak it calls them back.
They return once empty, or by force after a deadline (EL1, EL2; paper of 2019, RB8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from control_plane.api.machines import MachineRecord
from control_plane.broker.brokers import Brokers, change_each
from control_plane.broker.core.assignment import (
    lent,
    not_lendable,
    not_returnable,
    returned,
    revoked,
)
from control_plane.broker.holds import refused
from control_plane.runtime.limits import Limit
from control_plane.runtime.runtime import Runtime
from wire.errors import Conflict, FieldError, NotFound, TwineError

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 1.0
_FORCE_S = 5.0
"""Time before the end of a promise at which a machine goes back by force."""
_AT_ONCE = 50
"""Machines that go back at once: a slow store must not use up the promise."""
ProfileOf = Callable[[str], str]
"""Returns the host profile of an entitlement, empty if there is no such entitlement."""
IsEmpty = Callable[[str], bool]
"""Returns whether nothing is placed on a machine."""


class Loans:
    """Lends machines, calls them back, and ensures their return."""

    def __init__(self, brokers: Brokers, runtime: Runtime, limit: Limit | None = None) -> None:
        """`limit` bounds how many machines with tasks are taken back by force."""
        self._limit = limit
        self._brokers = brokers
        self._runtime = runtime
        self._lent: set[str] = set()
        brokers.listen(self._index)

    def lent(self) -> list[MachineRecord]:
        """Return all machines on loan, by name; their records name lender and borrower (EL4)."""
        return [self._brokers.table.get(name) for name in sorted(self._lent)]

    async def lend(
        self,
        machine: str,
        borrower: str,
        profile: str,
        *,
        donor: str,
        empty: bool,
        promise_s: float = 0.0,
        loan_s: float | None = None,
    ) -> MachineRecord:
        """Give a machine of the donor (empty: the free pool) to the borrower for a while.

        The machine must be up and empty; the caller checks `empty`. `profile` is the borrower's.
        Once called back, the machine returns within `promise_s`; it goes back after `loan_s` in any
        case.
        """
        broker = self._brokers.of(machine)

        def change(record: MachineRecord) -> MachineRecord:
            now = self._runtime.date()
            why = not_lendable(record, donor, borrower, now)
            if not why and not empty:
                why = "still runs tasks"
            if why:
                raise Conflict(f"cannot lend machine {machine!r}: it {why}")
            return lent(record, borrower, profile, now, promise_s, loan_s)

        record = await broker.table.update(machine, change)
        fields = {"machine": machine, "entitlement": borrower, "donor": donor}
        log.info("machine lent", extra=fields)
        return record

    async def revoke(
        self, machines: Collection[str], return_within_s: float, why: str = ""
    ) -> list[MachineRecord]:
        """Call machines back; the borrower's tasks must move away within `return_within_s`."""
        records = {name: self._brokers.table.get(name) for name in sorted(set(machines))}
        errors = [
            FieldError(field=name, reason="is not on loan")
            for name, record in records.items()
            if record.loan is None
        ]
        if errors:
            raise refused(f"revoke {len(records)} loans", errors)
        now = self._runtime.date()

        def change(record: MachineRecord) -> MachineRecord:
            by = now + return_within_s
            return record if record.loan is None else revoked(record, now, by, why)

        changed = await change_each(self._brokers, records, change)
        log.info("loans revoked", extra={"machines": len(changed)})
        return changed

    async def give_back(self, machine: str, profile: str, *, empty: bool) -> MachineRecord:
        """Return a machine to its donor, or to the free pool if `profile` is empty.

        The machine gets the donor's `profile`. Before the deadline it must be `empty`.
        """
        broker = self._brokers.of(machine)

        def change(record: MachineRecord) -> MachineRecord:
            now = self._runtime.date()
            if why := not_returnable(record, now, empty=empty):
                raise Conflict(f"cannot return machine {machine!r}: it {why}")
            return returned(record, profile, now)

        record = await broker.table.update(machine, change)
        fields = {"machine": machine, "entitlement": record.entitlement, "forced": not empty}
        log.info("machine returned", extra=fields)
        return record

    async def run(self, is_empty: IsEmpty, profile_of: ProfileOf) -> None:
        """Give back revoked machines that are empty or overdue, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            due = [r for r in self.lent() if r.loan is not None and r.loan.revoked_at is not None]
            for first in range(0, len(due), _AT_ONCE):
                some = due[first : first + _AT_ONCE]
                tries = (self._try(r, is_empty(r.machine), profile_of) for r in some)
                await asyncio.gather(*tries)

    async def _try(self, record: MachineRecord, empty: bool, profile_of: ProfileOf) -> None:
        """Give a machine back if it is time; after a failure the next round tries again."""
        assert record.loan is not None
        if not empty and _forced_return_at(record) > self._runtime.date():
            return
        if not empty and self._limit is not None and self._limit.take(self._runtime.now()) > 0:
            return
        try:
            profile = profile_of(record.loan.donor) if record.loan.donor else ""
            await self.give_back(record.machine, profile, empty=empty)
        except (Conflict, NotFound):
            pass  # the machine changed in the meantime
        except TwineError as e:
            fields = {"machine": record.machine, "reason": str(e)}
            log.warning("machine could not be returned", extra=fields)

    def _index(self, name: str, _: MachineRecord | None, after: MachineRecord | None) -> None:
        if after is not None and after.loan is not None:
            self._lent.add(name)
        else:
            self._lent.discard(name)


def _forced_return_at(record: MachineRecord) -> float:
    """Return when a machine goes back even if tasks still run there.

    With a promise, tasks may need longer than their deadline, until just before the promised time.
    """
    if (loan := record.loan) is None or loan.return_by is None:
        return float("inf")
    if loan.revoked_at is None or not loan.promise_s:
        return loan.return_by
    return max(loan.return_by, loan.revoked_at + loan.promise_s - _FORCE_S)
