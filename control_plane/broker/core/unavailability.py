"""Unavailability events: why a machine is not usable, now or soon, and what that causes.

In a failure or a planned reboot, tasks stay until the scheduler decides. The other kinds of event
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
"""After these events the machine is the same as before."""
_SOON = {
    EventKind.MAINTENANCE: "will be taken for maintenance",
    EventKind.DECOMMISSION: "will be decommissioned",
    EventKind.REFRESH: "will be replaced",
    EventKind.REVOKED: "will be recalled from its loan",
    EventKind.POWER_CAP: "will have less power",
    EventKind.PROFILE: "will get another host profile",
}
_NOW = {
    EventKind.MAINTENANCE: "is being taken for maintenance",
    EventKind.DECOMMISSION: "is being decommissioned",
    EventKind.REFRESH: "is being replaced",
    EventKind.REVOKED: "is being recalled from its loan",
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


def blocking(record: MachineRecord, now: float) -> str:
    """Return why planned events keep new tasks from a machine, as a predicate.

    Empty if none does. Failures and reboots are left out: the states of machine and profile
    include them.
    """
    due = [e for e in _open(record, MOVING) if e.start - NOTICE_S <= now]
    if not due:
        return ""
    event = min(due, key=lambda e: e.start)
    return f"{(_NOW if event.start <= now else _SOON)[event.kind]}: {event.reason}"


def of_plan(record: MachineRecord, plan: str, since: float = 0.0) -> UnavailabilityEvent | None:
    """Return the last event of a plan for a machine, open or ended.

    Events that ended before `since` are of an earlier plan with the name.
    """
    events = (event for event in record.unavailability if event.plan == plan)
    found = [event for event in events if event.end is None or event.end >= since]
    return found[-1] if found else None


def departure(record: MachineRecord, now: float) -> UnavailabilityEvent | None:
    """Return the event that makes the tasks of a machine move away now.

    If there are several, it is the event with the nearest deadline.
    """
    due = [event for event in _open(record, MOVING) if event.start <= now]
    return min(due, key=lambda e: (e.deadline is None, e.deadline or 0.0, e.start), default=None)


def planned(record: MachineRecord) -> tuple[UnavailabilityEvent, ...]:
    """Return the events that take the machine away from its tasks, now or later."""
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

    The work was announced to keep the tasks, so they are not restarted before its announced end.
    """
    return any(
        event.tasks_survive
        and event.deadline is not None
        and event.deadline <= now < event.deadline + (event.expected_duration_s or 0.0) + BACK_S
        for event in _open(record, MOVING)
    )


def returning(record: MachineRecord, now: float) -> bool:
    """Return whether a machine that tasks must leave now will come back unchanged."""
    due = [event for event in _open(record, MOVING) if event.start <= now]
    return bool(due) and all(event.kind in _PASSING for event in due)


def removable(record: MachineRecord, now: float) -> str:
    """Return why the record of a free machine must stay, as a predicate; empty if it may go."""
    if not any(event.start <= now for event in _open(record, _FINAL)):
        return "is not being decommissioned or replaced"
    return ""


def began(record: MachineRecord, event: UnavailabilityEvent) -> MachineRecord:
    """Return the record with an event; it replaces an open event of the same kind and plan.

    So a machine can have a kernel update and a switch repair at once, each with its own plan. The
    oldest ended events are dropped; open events never are.
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


def with_event(
    record: MachineRecord,
    kind: EventKind,
    reason: str,
    start: float,
    deadline: float | None = None,
) -> MachineRecord:
    """Return the record with a new event, which no operator has planned; see `began`."""
    event = UnavailabilityEvent(
        event_id=f"{record.machine}-{kind}-{start:.3f}",
        kind=kind,
        reason=reason,
        start=start,
        deadline=deadline,
    )
    return began(record, event)


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
