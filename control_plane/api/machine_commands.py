"""What is asked of a broker about one machine: commands that cross a process or the disk.

Each says all that the broker needs; nothing of who sends it has to run where the machine's record
is. What a command does to a record is `broker/core/commands.py`.
"""

from __future__ import annotations

import msgspec

from agent.api import MachineFacts, ProfileStatus
from control_plane.api.machines import EventKind, UnavailabilityEvent


class _NamedCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """Its name is in the field `command`."""


class MarkDown(_NamedCommand, frozen=True, kw_only=True, tag="mark-down"):
    """Record a failure (RB3); nothing if the machine is down already."""

    reason: str
    until: float | None = None
    """Seconds since 1970 after which it is not carried out any more: by then it may be up."""


class MarkUp(_NamedCommand, frozen=True, kw_only=True, tag="mark-up"):
    """Record the end of a failure."""


class QuarantineMachine(_NamedCommand, frozen=True, kw_only=True, tag="quarantine"):
    """Free a machine that cannot reach its profile, and keep it from that profile.

    One that was lent goes to the free pool, too: it is of no use to its donor.
    """

    reason: str
    until: float
    """Seconds since 1970."""


class RaiseGeneration(_NamedCommand, frozen=True, kw_only=True, tag="raise-generation"):
    """Let the machine be asked for its profile once more, as a new request."""

    above: int


class WantProfile(_NamedCommand, frozen=True, kw_only=True, tag="want-profile"):
    """Have a machine be brought to another profile, as long as it is the entitlement's."""

    entitlement: str
    profile: str


class NoteProfile(_NamedCommand, frozen=True, kw_only=True, tag="note-profile"):
    """Record what the agent proved about its profile; ends an expected reboot."""

    seen: ProfileStatus


class NoteFacts(_NamedCommand, frozen=True, kw_only=True, tag="note-facts"):
    """Record what the machine has, as its agent says."""

    facts: MachineFacts


class ExpectReboot(_NamedCommand, frozen=True, kw_only=True, tag="expect-reboot"):
    """Record that the machine will be away on purpose until a deadline at most."""

    reason: str
    deadline: float
    """Seconds since 1970."""


class BeginEvent(_NamedCommand, frozen=True, kw_only=True, tag="begin-event"):
    """Add an event; it takes the place of an open one of its kind and plan."""

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
