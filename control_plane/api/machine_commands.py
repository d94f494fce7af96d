"""Commands to a broker about one machine, sent between processes or stored.

Each contains everything that the broker needs, so the sender may run in another process.
`broker/core/commands.py` applies a command to a record.
"""

from __future__ import annotations

import msgspec

from agent.api import MachineFacts, ProfileStatus
from control_plane.api.machines import EventKind, UnavailabilityEvent


class _NamedCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """Base of the commands; the field `command` has the name."""


class MarkDown(_NamedCommand, frozen=True, kw_only=True, tag="mark-down"):
    """Record a failure (RB3); no effect if the machine is down already."""

    reason: str
    until: float | None = None
    """Seconds since 1970 after which the command is void: the machine may be up by then."""


class MarkUp(_NamedCommand, frozen=True, kw_only=True, tag="mark-up"):
    """Record the end of a failure."""


class QuarantineMachine(_NamedCommand, frozen=True, kw_only=True, tag="quarantine"):
    """Free a machine that cannot reach its profile, and keep it from that profile.

    A lent machine also goes to the free pool: its donor cannot use it.
    """

    reason: str
    until: float
    """Seconds since 1970."""


class RaiseGeneration(_NamedCommand, frozen=True, kw_only=True, tag="raise-generation"):
    """Send the machine its profile again, as a new request."""

    above: int


class WantProfile(_NamedCommand, frozen=True, kw_only=True, tag="want-profile"):
    """Bring the machine to another profile, as long as it belongs to the entitlement."""

    entitlement: str
    profile: str


class NoteProfile(_NamedCommand, frozen=True, kw_only=True, tag="note-profile"):
    """Record the agent's verified profile; ends an expected reboot."""

    seen: ProfileStatus


class NoteFacts(_NamedCommand, frozen=True, kw_only=True, tag="note-facts"):
    """Record the machine's hardware, as its agent reports it."""

    facts: MachineFacts


class ExpectReboot(_NamedCommand, frozen=True, kw_only=True, tag="expect-reboot"):
    """Record a planned reboot, with a deadline."""

    reason: str
    deadline: float
    """Seconds since 1970."""


class BeginEvent(_NamedCommand, frozen=True, kw_only=True, tag="begin-event"):
    """Add an event; it replaces an open one of its kind and plan."""

    event: UnavailabilityEvent


class EndEvents(_NamedCommand, frozen=True, kw_only=True, tag="end-events"):
    """End the open events of these kinds."""

    kinds: list[EventKind]


MachineCommand = (
    MarkDown
    | MarkUp
    | QuarantineMachine
    | RaiseGeneration
    | WantProfile
    | NoteProfile
    | NoteFacts
    | ExpectReboot
    | BeginEvent
    | EndEvents
)
