"""Machines as the resource broker records them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agent.api import Location, MachineFacts, ProfileState


class MachineState(StrEnum):
    """Whether a machine can be used, as its health is known now."""

    UP = "up"
    DOWN = "down"
    """It did not answer for longer than the grace; it may still run its tasks."""


class EventKind(StrEnum):
    """Why a machine is not usable."""

    FAILURE = "failure"
    PLANNED = "planned"


class UnavailabilityEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Why and since (or from) when a machine is not usable (paper §2.2)."""

    event_id: str
    kind: EventKind
    reason: str
    start: float
    """Seconds since 1970."""
    deadline: float | None = None
    end: float | None = None


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: what it is, where it is, to whom it is assigned, how it does."""

    schema: int = 1
    machine: str
    location: Location
    machine_type: str
    address: str
    """`host:port` of its agent."""
    facts: MachineFacts
    state: MachineState = MachineState.UP
    joined_at: float = 0.0
    entitlement: str = ""
    """The entitlement it is assigned to; empty: in the region's free pool."""
    assignment_generation: int = 0
    """Rises with each assignment; the generation of the profile that the agent is sent."""
    profile_wanted: str = ""
    profile: str = ""
    """The profile that the machine last proved to run."""
    profile_state: ProfileState = ProfileState.NONE
    profile_detail: str = ""
    unavailability: list[UnavailabilityEvent] = []
    quarantined_profile: str = ""
    """A profile that the machine failed to reach …"""
    quarantined_until: float = 0.0
    """… so that it is not taken for it again before this."""
    quarantine_reason: str = ""


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the front end shows it."""

    record: MachineRecord
    tasks: list[str] = []
    """Ids of the tasks that are placed on it."""
    ready: bool = False
    """Up, and its agent answered lately."""
    last_seen_s: float | None = None
    """Seconds since its agent last answered; None: never since this process started."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """All machines of the region."""

    machines: list[MachineView]


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish for a one-time join token, bound to one host name."""

    machine: str
    ttl_s: float = 600.0


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A one-time join token; it is shown once and stored only as a hash."""

    token: str
    ca_hash: str
    """`sha256:<hex>` over the authority's certificate (DER)."""
    url: str
    machine: str
    expires_at: float
