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
    """Why a machine is not usable now or in the future."""

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
    """It gets another host profile, which is impossible while its tasks run."""
    POWER_CAP = "power-cap"
    """Its power is capped: it is slower, tasks move away, and it stays in its entitlement."""


class UnavailabilityEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Why a machine is not usable, and from when on (paper §2.2)."""

    event_id: str
    kind: EventKind
    reason: str
    start: float
    """Seconds since 1970."""
    deadline: float | None = None
    """When the work begins even if tasks still run there (planned kinds), or ends at the latest."""
    expected_duration_s: float | None = None
    """Seconds that the work takes, from the deadline on."""
    tasks_survive: bool = False
    """Tasks continue to run, but cannot be reached: a switch is replaced. They are not stopped at
    the deadline, and silence during the expected duration moves none of them."""
    plan: str = ""
    """The plan of the ops planner that it belongs to; empty: none."""
    end: float | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Hardware of machines of one type, from the inventory.

    All machines of the same hardware share one object. Zero means none or unknown.
    """

    generation: Id = ""
    """Processor generation: `skylake`."""
    sku: Id = ""
    """Purchased configuration: `web-1s-64g`."""
    rru: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Relative resource units: computing power against a reference machine (paper §2.2)."""
    cpus: Few = 0
    memory_bytes: Bytes = 0
    gpus: Few = 0
    gpu_type: Id = ""
    network_mbps: Count = 0
    disk_bytes: Bytes = 0
    """Size of the file system that holds images and tasks."""
    power_w: Count = 0
    """Nominal power draw; row and MSB are provisioned for it."""


class Loan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The loan of a whole machine (EL3); `MachineRecord.entitlement` is the borrower."""

    donor: str
    """The entitlement that gets it back; empty: the free pool."""
    since: float
    revoked_at: float | None = None
    return_by: float | None = None
    """Once revoked, the machine is returned by force at this time."""
    promise_s: float = 0.0
    """Seconds in which it is back once it is wanted; 0: lent by hand, without a promise."""
    until: float | None = None
    """When it ends automatically; None: never."""


class Hold(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A free machine promised to an allocation that is not yet decided (first phase)."""

    transaction: str
    entitlement: str
    profile: str
    since: float


class MachineRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One machine: hardware, place, entitlement and state."""

    schema: int = 1
    machine: str
    location: Location
    machine_type: str
    address: str = ""
    """`host:port` of its agent; empty until it has joined."""
    facts: MachineFacts | None = None
    """Facts from its agent; None: the machine was imported and has not joined yet."""
    hardware: Hardware | None = None
    """Hardware from the inventory; the agent's report of memory and CPUs takes precedence."""
    cluster: str = ""
    """Its historic cluster, which is the scope of decommissions and refreshes (MO21)."""
    labels: dict[str, str] | None = None
    """Labels set by operators: `zone` → `a`; None: none."""
    state: MachineState = MachineState.UP
    joined_at: float = 0.0
    entitlement: str = ""
    """The entitlement it is assigned to; empty: in the region's free pool."""
    assignment_generation: int = 0
    """Rises with each assignment; sent to the agent as the generation of the profile."""
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
    """The entitlement that last gave it back: its unused quota serves others (AS6)."""


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as the front end shows it."""

    record: MachineRecord
    tasks: list[str] = []
    """Ids of the tasks that are placed on it."""
    ready: bool = False
    """Up, and its agent answered recently."""
    last_seen_s: float | None = None
    """Seconds since its agent last answered; None: never since this process started."""
    health: str = ""
    """Why its silence has no effect yet, or why it is not up again although it answers."""
    identity_not_after: float | None = None
    """When the last certificate of its agent expires, in seconds since 1970."""
    duplicate: str = ""
    """The clone that has its identity, and the host that keeps it; empty: there is none."""


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of the region, by name."""

    machines: list[MachineView]
    next: str = ""
    """Pass it as `after` for the next page; empty: this is the last page."""


class MachineCell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One machine on the map of the region."""

    machine: str
    meaning: str
    entitlement: str = ""
    """Empty: it is in the free pool."""
    tasks: Count = 0


class RackMap(msgspec.Struct, frozen=True, kw_only=True):
    """The machines of one rack, counted by their value on the map."""

    datacenter: str
    msb: str
    rack: str
    counts: dict[str, Count]
    """Meaning → machines: `in use` → 38."""
    cells: list[MachineCell] = []
    """Each machine by name; a region of more than 4,000 machines gets only the counts."""


class MachineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An unavailability event and its machine."""

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
    """Events that have not ended; at most 50."""
    open_events: Count = 0


TOKEN_LIFE_MIN_S, TOKEN_LIFE_MAX_S = 1.0, 7 * 86_400.0


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for a one-time join token, bound to one host name."""

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
