"""Changes the owner of a machine: free, held, assigned, lent.

A machine is free or in exactly one entitlement (MO9): one field of one record. Only these functions
change that field; the broker stores what they return.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import ProfileState
from control_plane.api.machines import EventKind, Loan, MachineRecord, MachineState
from control_plane.broker.core.unavailability import blocking, ended, with_event

FREE = ""
"""The entitlement of a machine in the region's free pool."""


def not_free(record: MachineRecord) -> str:
    """Return why a machine is not free to be taken, as a predicate; empty if it is free."""
    if record.entitlement != FREE:
        return f"is in entitlement {record.entitlement!r}"
    if record.hold is not None:
        return f"is held by transaction {record.hold.transaction!r}"
    return ""


def not_holdable(record: MachineRecord, now: float) -> str:
    """Return why a machine cannot be promised to an allocation, as a predicate."""
    if why := not_free(record):
        return why
    if record.state is not MachineState.UP:
        return "is down"
    return blocking(record, now)


def assigned(record: MachineRecord, entitlement: str, profile: str, now: float) -> MachineRecord:
    """Return the record as assigned: the machine must prove its profile again.

    A reboot for an earlier profile is no longer expected.
    """
    return replace(
        ended(record, now, (EventKind.PLANNED,)),
        entitlement=entitlement,
        assignment_generation=record.assignment_generation + 1,
        profile_wanted=profile,
        profile_state=ProfileState.NONE,
        profile_detail="",
        hold=None,
    )


def released(record: MachineRecord, now: float) -> MachineRecord:
    """Return the record as back in the free pool.

    The entitlement's loan and switch of profile end with it.
    """
    loan, left_by = record.loan, record.entitlement
    if loan is not None:  # the machine was the donor's, not the borrower's
        left_by = loan.donor or record.left_by
    record = ended(record, now, (EventKind.REVOKED, EventKind.PROFILE))
    return replace(record, entitlement=FREE, profile_wanted="", loan=None, left_by=left_by)


def not_releasable(record: MachineRecord) -> str:
    """Return why a machine may not go to the free pool, as a predicate."""
    if record.entitlement == FREE:
        return not_free(record) or "is already in the free pool"
    if record.loan is not None and record.loan.donor != FREE:
        return f"is on loan from entitlement {record.loan.donor!r}, to which it returns"
    return ""


def not_lendable(record: MachineRecord, donor: str, borrower: str, now: float) -> str:
    """Return why `donor` cannot lend this machine, as a predicate; tasks are not checked."""
    if record.loan is not None:
        return f"is already on loan, to entitlement {record.entitlement!r}"
    if record.entitlement != donor:
        where = f"entitlement {record.entitlement!r}" if record.entitlement else "the free pool"
        return f"is in {where}, not in {f'entitlement {donor!r}' if donor else 'the free pool'}"
    if borrower == donor:
        return f"is already in entitlement {borrower!r}"
    if record.hold is not None:
        return not_free(record)
    if record.state is not MachineState.UP:
        return "is down"
    return blocking(record, now)


def lent(
    record: MachineRecord,
    borrower: str,
    profile: str,
    now: float,
    promise_s: float = 0.0,
    loan_s: float | None = None,
) -> MachineRecord:
    """Return the record as lent by its present pool (EL1, EL4)."""
    until = None if loan_s is None else now + loan_s
    loan = Loan(donor=record.entitlement, since=now, promise_s=promise_s, until=until)
    return replace(assigned(record, borrower, profile, now), loan=loan)


def revoked(record: MachineRecord, now: float, return_by: float, why: str = "") -> MachineRecord:
    """Return the record with its loan called back; a second call can only shorten the time."""
    loan = record.loan
    assert loan is not None
    if loan.return_by is not None:
        return_by = min(loan.return_by, return_by)
    since = now if loan.revoked_at is None else loan.revoked_at
    reason = f"its loan to {record.entitlement} was revoked" + (f": {why}" if why else "")
    loan = replace(loan, revoked_at=since, return_by=return_by)
    return with_event(replace(record, loan=loan), EventKind.REVOKED, reason, since, return_by)


def not_returnable(record: MachineRecord, now: float, *, empty: bool) -> str:
    """Return why a lent machine does not go back yet, as a predicate."""
    if record.loan is None:
        return "is not on loan"
    if empty or (record.loan.return_by is not None and record.loan.return_by <= now):
        return ""
    return "still runs tasks of the borrower, and its loan does not end yet"


def returned(record: MachineRecord, profile: str, now: float) -> MachineRecord:
    """Return the record as back with its donor, under this profile; free if `profile` is empty.

    A deleted donor has no profile, so its machine goes to the free pool.
    """
    loan = record.loan
    assert loan is not None
    record = released(record, now)
    if loan.donor == FREE or not profile:
        return record
    return assigned(record, loan.donor, profile, now)
