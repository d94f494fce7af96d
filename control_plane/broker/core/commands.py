"""Applies a command to the record of its machine. Pure: the broker stores the result."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from agent.api import ProfileState
from control_plane.api.machine_commands import (
    BeginEvent,
    EndEvents,
    ExpectReboot,
    MachineCommand,
    MarkDown,
    MarkUp,
    NoteFacts,
    NoteProfile,
    QuarantineMachine,
    RaiseGeneration,
    WantProfile,
)
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.broker.core.assignment import released
from control_plane.broker.core.unavailability import began, ended, open_event, with_event


def carried_out(record: MachineRecord, command: MachineCommand, now: float) -> MachineRecord:
    """Return the record after a command; the same object if the command changes nothing."""
    match command:
        case MarkDown(reason=reason, until=until):
            if record.state is MachineState.DOWN or (until is not None and now > until):
                return record
            failed = with_event(record, EventKind.FAILURE, reason, now)
            return replace(failed, state=MachineState.DOWN)
        case MarkUp():
            if record.state is MachineState.UP:
                return record
            return replace(ended(record, now, (EventKind.FAILURE,)), state=MachineState.UP)
        case RaiseGeneration(above=above):
            generation = max(record.assignment_generation, above) + 1
            return replace(record, assignment_generation=generation)
        case NoteFacts(facts=facts):
            return replace(record, facts=facts)
        case ExpectReboot(reason=reason, deadline=deadline):
            if open_event(record, EventKind.PLANNED):
                return record
            return with_event(record, EventKind.PLANNED, reason, now, deadline)
        case BeginEvent(event=event):
            return began(record, event)
        case EndEvents(kinds=kinds):
            return ended(record, now, kinds)
        case QuarantineMachine() | WantProfile() | NoteProfile():
            return _about_profile(record, command, now)
    assert_never(command)


def _about_profile(
    record: MachineRecord, command: QuarantineMachine | WantProfile | NoteProfile, now: float
) -> MachineRecord:
    match command:
        case QuarantineMachine(reason=reason, until=until):
            return replace(
                released(ended(record, now, (EventKind.PLANNED,)), now),
                quarantined_profile=record.profile_wanted,
                quarantined_until=until,
                quarantine_reason=reason,
                profile_state=ProfileState.DEGRADED,
                profile_detail=reason,
            )
        case WantProfile(entitlement=entitlement, profile=profile):
            if record.entitlement != entitlement or record.profile_wanted == profile:
                return record
            return replace(
                record,
                assignment_generation=record.assignment_generation + 1,
                profile_wanted=profile,
                profile_state=ProfileState.NONE,
                profile_detail="",
            )
        case NoteProfile(seen=seen):
            record = replace(record, profile_state=seen.state, profile_detail=seen.detail)
            if seen.state is not ProfileState.VERIFIED:
                return record
            return ended(replace(record, profile=seen.name), now, (EventKind.PLANNED,))
