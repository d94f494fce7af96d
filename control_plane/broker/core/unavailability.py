"""Why a machine is not usable, or soon will not be: its events and their effects.

Tasks keep their place in a failure or a planned reboot until the scheduler decides; the other kinds
take the machine away, so tasks must move (paper §2.2, §4.1).
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent

NOTICE_S = 3600.0
"""A machine takes no new tasks when its event begins within this time."""
BACK_S = 30.0
"""Time after the announced end of work until a machine must answer: twice the silence that marks
any other machine down."""
EVENTS_KEPT = 20
DRAINING = (
    EventKind.MAINTENANCE,
    EventKind.DECOMMISSION,
    EventKind.REFRESH,
    EventKind.POWER_CAP,
)
"""Kinds that operators plan, and may cancel."""
MOVING = (*DRAINING, EventKind.REVOKED, EventKind.PROFILE)
"""Tasks must move away."""
_FINAL = (EventKind.DECOMMISSION, EventKind.REFRESH)
_PASSING = (EventKind.MAINTENANCE, EventKind.POWER_CAP, EventKind.PROFILE)
"""Afterwards the machine is as it was."""
_SOON = {
    EventKind.MAINTENANCE: "is going to be taken for maintenance",
    EventKind.DECOMMISSION: "is going to be decommissioned",
    EventKind.REFRESH: "is going to be replaced",
    EventKind.REVOKED: "is called back from its loan",
    EventKind.POWER_CAP: "is going to have less power",
    EventKind.PROFILE: "is going to get another host profile",
}
_NOW = {
    EventKind.MAINTENANCE: "is being taken for maintenance",
    EventKind.DECOMMISSION: "is being decommissioned",
    EventKind.REFRESH: "is being replaced",
    EventKind.REVOKED: "is called back from its loan",
    EventKind.POWER_CAP: "has less power than it needs",
    EventKind.PROFILE: "is getting another host profile",
}


def open_event(record: MachineRecord, kind: EventKind) -> UnavailabilityEvent | None:
    """Return the event of a kind that has not ended."""
    for event in record.unavailability:
        if event.kind is kind and event.end is None:
            return event
    return None


def failures(record: MachineRecord) -> list[float]:
    """Return when a machine failed, in seconds since 1970, as far as that is recorded."""
    return [event.start for event in record.unavailability if event.kind is EventKind.FAILURE]


def blocking(record: MachineRecord, now: float, notice_s: float = NOTICE_S) -> str:
    """Return why planned events keep new tasks from a machine, as a predicate.

    Empty: nothing prevents it. Failures and reboots are ignored: the states of machine and profile
    have them.
    """
    due = [e for e in _open(record, MOVING) if e.start - notice_s <= now]
    if not due:
        return ""
    event = min(due, key=lambda e: e.start)
    return f"{(_NOW if event.start <= now else _SOON)[event.kind]}: {event.reason}"


def of_plan(record: MachineRecord, plan: str) -> UnavailabilityEvent | None:
    """Return the last event of a plan for a machine, open or ended."""
    found = [event for event in record.unavailability if event.plan == plan]
    return found[-1] if found else None


def departure(record: MachineRecord, now: float) -> UnavailabilityEvent | None:
    """Return the event that makes the tasks of a machine move away now.

    Of several, it is the one with the nearest deadline.
    """
    due = [event for event in _open(record, MOVING) if event.start <= now]
    return min(due, key=lambda e: (e.deadline is None, e.deadline or 0.0, e.start), default=None)


def planned(record: MachineRecord) -> tuple[UnavailabilityEvent, ...]:
    """Return what takes the machine away from its tasks, now or later."""
    return tuple(_open(record, MOVING))


def leaving(record: MachineRecord, now: float) -> bool:
    """Return whether the tasks of a machine must move away now."""
    return any(event.start <= now for event in _open(record, MOVING))


def overdue(record: MachineRecord, now: float) -> bool:
    """Return whether planned work on the machine begins now, even if tasks still run there."""
    events = _open(record, MOVING)
    return any(
        event.deadline is not None and event.deadline <= now and not event.tasks_survive
        for event in events
    )


def excused(record: MachineRecord, now: float) -> bool:
    """Return whether announced work explains the silence of a machine whose tasks run.

    Work that uses its whole time must not restart the tasks that it was announced to keep.
    """
    return any(
        event.tasks_survive
        and event.deadline is not None
        and event.deadline <= now < event.deadline + (event.expected_duration_s or 0.0) + BACK_S
        for event in _open(record, MOVING)
    )


def returning(record: MachineRecord, now: float) -> bool:
    """Return whether a machine that tasks must leave now will be there again afterwards."""
    due = [event for event in _open(record, MOVING) if event.start <= now]
    return bool(due) and all(event.kind in _PASSING for event in due)


def removable(record: MachineRecord, now: float) -> str:
    """Return why a free machine may not be forgotten, as a predicate; empty: it may."""
    if not any(event.start <= now for event in _open(record, _FINAL)):
        return "is not being decommissioned or replaced"
    return ""


def began(record: MachineRecord, event: UnavailabilityEvent) -> MachineRecord:
    """Return the record with an event; it replaces an open one of its kind and plan.

    So a kernel and a switch may be due at once, each with its own plan. The oldest ended events are
    dropped; open ones never are.
    """

    def is_other(known: UnavailabilityEvent) -> bool:
        return known.end is not None or (known.kind, known.plan) != (event.kind, event.plan)

    others = [known for known in record.unavailability if is_other(known)]
    surplus = len(others) - EVENTS_KEPT
    kept = []
    for other in others:
        if surplus > 0 and other.end is not None:
            surplus -= 1
        else:
            kept.append(other)
    return replace(record, unavailability=(*kept, event))


def ended(
    record: MachineRecord, now: float, kinds: Collection[EventKind], event_id: str = ""
) -> MachineRecord:
    """Return the record with its open events of these kinds (or the one named) ended."""
    if not record.unavailability:
        return record

    def over(event: UnavailabilityEvent) -> bool:
        named = event.event_id == event_id if event_id else event.kind in kinds
        return named and event.end is None

    if not any(over(event) for event in record.unavailability):
        return record
    events = tuple(replace(e, end=now) if over(e) else e for e in record.unavailability)
    return replace(record, unavailability=events)


def _open(record: MachineRecord, kinds: Collection[EventKind]) -> list[UnavailabilityEvent]:
    if not record.unavailability:
        return []
    return [e for e in record.unavailability if e.end is None and e.kind in kinds]
