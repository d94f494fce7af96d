"""Machines as the resource broker records them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Bytes, Count, Few, Id, Location, MachineFacts, Name, ProfileState


class MachineState(StrEnum):
    """Whether a machine can be used, by its present health."""

    UP = "up"
    DOWN = "down"
    """It did not answer for longer than the grace period; its tasks may still run."""


class EventKind(StrEnum):
    """Why a machine is not usable, or will not be."""

    FAILURE = "failure"
    PLANNED = "planned"
    """It reboots for its host profile; tasks may stay placed there."""
    MAINTENANCE = "maintenance"
    """Tasks move away before `deadline`; the machine comes back."""
    DECOMMISSION = "decommission"
    """Tasks move away before `deadline`; the machine does not come back."""
    REFRESH = "refresh"
    """Hardware refresh: like a decommission, and another machine takes its place."""
    REVOKED = "revoked"
    """Its loan is called back; tasks of the borrower move away before `deadline`."""
    PROFILE = "profile"
    """It gets another host profile, which cannot be done while its tasks run."""
    POWER_CAP = "power-cap"
    """Its power is capped: it runs slower, tasks move away, and it keeps its entitlement."""


class UnavailabilityEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Why and since (or from) when a machine is not usable (paper §2.2)."""

    event_id: str
    kind: EventKind
    reason: str
    start: float
    """Seconds since 1970."""
    deadline: float | None = None
    """When the work begins even if tasks still run there (planned kinds), or ends at the latest."""
    expected_duration_s: float | None = None
    """From the deadline on."""
    tasks_survive: bool = False
    """Tasks run on meanwhile, but cannot be reached: a switch is replaced. They are not stopped at
    the deadline, and silence during the expected duration moves none of them."""
    plan: str = ""
    """The plan of the ops planner that it belongs to; empty: none."""
    end: float | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Hardware of machines of one type, from the inventory.

    One object is shared by all machines that are alike. Zero: none, or unknown.
    """

    generation: Id = ""
    """Of the processor: `skylake`."""
    sku: Id = ""
    """What was bought: `web-1s-64g`."""
    rru: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Relative resource units: computing power against a reference machine (paper §2.2)."""
    cpus: Few = 0
    memory_bytes: Bytes = 0
    gpus: Few = 0
    gpu_type: Id = ""
    network_mbps: Count = 0
    disk_bytes: Bytes = 0
    """Of the file system that holds images and tasks."""
    power_w: Count = 0
    """Nominal draw, for which its row and MSB are provisioned."""


class Loan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A whole machine lent for a while (EL3); `MachineRecord.entitlement` is the borrower."""

    donor: str
    """The entitlement that gets it back; empty: the free pool."""
    since: float
    revoked_at: float | None = None
    return_by: float | None = None
    """Given back by force at this time, once revoked."""
    promise_s: float = 0.0
    """Returned within this time once it is wanted; 0: it was lent by hand, without a promise."""
    until: float | None = None
    """When it ends by itself; None: never."""


class Hold(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A free machine promised to an allocation that is not yet decided (first phase)."""

    transaction: str
    entitlement: str
    profile: str
    since: float


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One machine: what it is, where it is, which entitlement it is assigned to, and its state."""

    schema: int = 1
    machine: str
    location: Location
    machine_type: str
    address: str = ""
    """`host:port` of its agent; empty until it has joined."""
    facts: MachineFacts | None = None
    """From its agent; None: it was imported and has not joined yet."""
    hardware: Hardware | None = None
    """From the inventory; what its agent says about memory and CPUs wins."""
    cluster: str = ""
    """Label of the historic cluster, the scope of decommissions and refreshes (MO21)."""
    labels: dict[str, str] | None = None
    """Labels set by operators: `zone` → `a`; None: none."""
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
    unavailability: tuple[UnavailabilityEvent, ...] = ()
    quarantined_profile: str = ""
    """A profile that the machine failed to reach …"""
    quarantined_until: float = 0.0
    """… so that it is not assigned for it before this time."""
    quarantine_reason: str = ""
    hold: Hold | None = None
    loan: Loan | None = None
    left_by: str = ""
    """The entitlement that last gave it to the free pool: its unused quota serves others (AS6)."""


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the front end shows it."""

    record: MachineRecord
    tasks: list[str] = []
    """Ids of the tasks that are placed on it."""
    ready: bool = False
    """Up, and its agent answered lately."""
    last_seen_s: float | None = None
    """Seconds since its agent last answered; None: never since this process started."""
    health: str = ""
    """Why its silence has no effect yet, or why it is not trusted again although it answers."""
    identity_not_after: float | None = None
    """When the certificate that its agent showed last ends, in seconds since 1970."""
    duplicate: str = ""
    """The clone that has its identity, and the host that keeps it; empty: there is none."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of the region, by name."""

    machines: list[MachineView]
    next: str = ""
    """Pass it as `after` for those that follow; empty: these were the last."""


class MachineCell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One machine on the map of the region."""

    machine: str
    meaning: str
    entitlement: str = ""
    """Empty: it is in the free pool."""
    tasks: Count = 0


class RackMap(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one rack, counted by what the map shows."""

    datacenter: str
    msb: str
    rack: str
    counts: dict[str, Count]
    """Meaning → machines: `in use` → 38."""
    cells: list[MachineCell] = []
    """Each machine by name; a region of more than 4,000 machines gets only the counts."""


class MachineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that takes a machine away, now or later."""

    machine: str
    event: UnavailabilityEvent


class RegionMap(msgspec.Struct, frozen=True, kw_only=True):
    """Every machine of the region by place, with one fact about each."""

    by: str
    """`state`, `entitlement`, `profile`, `load` or `power`."""
    machines: Count
    racks: list[RackMap]
    """By data center, MSB and rack."""
    meanings: list[str] = []
    """All meanings, in the order of a legend."""
    events: list[MachineEvent] = []
    """Events that did not end; 50 of them at most."""
    open_events: Count = 0


TOKEN_LIFE_MIN_S, TOKEN_LIFE_MAX_S = 1.0, 7 * 86_400.0


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wish for a one-time join token, bound to one host name."""

    machine: Name
    ttl_s: Annotated[float, Meta(ge=TOKEN_LIFE_MIN_S, le=TOKEN_LIFE_MAX_S)] = 600.0


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A one-time join token; it is shown once and stored only as a hash."""

    token: str
    ca_hash: str
    """`sha256:<hex>` over the authority's certificate (DER)."""
    url: str
    machine: str
    expires_at: float
