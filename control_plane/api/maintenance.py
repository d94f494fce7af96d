"""Plans of the ops planner: work on machines, in waves, and its effect on jobs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Name
from control_plane.api.inventory import OfMachines, Seconds, Text
from control_plane.api.machines import EventKind

MACHINES_MAX = 200_000
"""Machines of one plan; more than any data center of the paper has."""
PART_MAX = 1000
"""Machines of one stored record, and the maximum of a wave."""
WaveSize = Annotated[int, Meta(ge=0, le=PART_MAX)]
Watts = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class Work(StrEnum):
    """What is done to the machines."""

    REPAIR = "repair"
    KERNEL = "kernel"
    FIRMWARE = "firmware"
    SWITCH = "switch"
    """A rack switch: its machines cannot be reached for a few minutes."""
    POWER_DEVICE = "power-device"
    POWER_CAP = "power-cap"
    """Less power is available for a while; the least important tasks leave first."""
    REFRESH = "refresh"
    """Other machines take their place."""
    DECOMMISSION = "decommission"


KIND = {
    Work.REFRESH: EventKind.REFRESH,
    Work.DECOMMISSION: EventKind.DECOMMISSION,
    Work.POWER_CAP: EventKind.POWER_CAP,
}
"""The kind of event for this work; all other work has `MAINTENANCE`."""


class Ends(StrEnum):
    """When the work on a machine is over."""

    REBOOT = "reboot"
    """When it has booted since its wave began, and answers."""
    TIME = "time"
    """When deadline and duration have passed, and it answers."""
    EMPTY = "empty"
    """When no task is left on it: it does not come back, or only its power was needed."""
    REPORTED = "reported"
    """When an operator reports it, and the machine answers."""


class Within(StrEnum):
    """The place that all machines of a wave share, so that work is in one such place at a time."""

    RACK = "rack"
    ROW = "row"
    MSB = "msb"
    DATACENTER = "datacenter"


class MaintenanceRequest(OfMachines, frozen=True, kw_only=True):
    """A request for work on machines: named ones, or all of a scope (HC4)."""

    work: Work = Work.REPAIR
    reason: Text
    start_in_s: Seconds = 0.0
    """Seconds from now until the tasks of the first wave begin to leave."""
    deadline_s: Seconds | None = None
    """Seconds after a wave's start at which work begins even if tasks still run there."""
    duration_s: Seconds | None = None
    """Seconds that the work takes, from the deadline on."""
    tasks_survive: bool = False
    """Tasks continue to run, but cannot be reached."""
    wave_size: WaveSize = 0
    """Maximum number of machines in a wave; 0: all machines of a place, or all machines."""
    within: Within | None = None
    """All machines of a wave are within one such place; None: no restriction."""
    return_within_s: Seconds = 3600.0
    """Seconds after its planned end in which a wave must be back; otherwise the plan pauses."""
    ends: Ends | None = None
    """When the work on a machine is over; None: by the kind of work."""
    shed_w: Watts = 0
    """With `power-cap`: stop once machines that draw this power are empty; 0: all machines."""
    despite: bool = False
    """The operator accepts what the preview warns of."""


class WaveState(StrEnum):
    """How far a wave is."""

    WAITING = "waiting"
    ANNOUNCED = "announced"
    """Its machines have the event, and tasks leave."""
    DONE = "done"
    CANCELLED = "cancelled"


class WaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of machines of a plan that are worked on together."""

    schema: int = 1
    plan: str
    number: int
    machines: list[str]
    state: WaveState = WaveState.WAITING
    start: float = 0.0
    """When it was announced to begin, in seconds since 1970."""
    boots: dict[str, str] = {}
    """Machine → its boot id when its wave was announced."""
    left_out: list[str] = []
    """Machines that did not come back; an operator continued the plan without them."""
    done: int = 0
    """Machines whose work was over when the wave was cancelled."""
    ended: float | None = None


class PlanState(StrEnum):
    """How far a plan is."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted plan, and its progress."""

    schema: int = 1
    name: str
    request: MaintenanceRequest = msgspec.field(name="wish")  # the name of stored records
    """The request, without the names of machines, which are in the waves."""
    ends: Ends
    by: str
    at: float
    machines: int
    waves: int
    state: PlanState = PlanState.RUNNING
    detail: str = ""
    """Why it is paused."""
    ended: float | None = None


class WaveView(msgspec.Struct, frozen=True, kw_only=True):
    """A wave, as it is shown."""

    number: int
    state: WaveState
    machines: int
    done: int
    left_out: int = 0
    waiting: dict[str, int] = {}
    """What machines wait for → number of machines."""
    ready: list[str] = []
    """Machines whose work may begin: no task runs there, or the rest may stay."""
    start: float | None = None
    deadline: float | None = None


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, as it is shown."""

    plan: PlanRecord
    done: int
    """Machines whose work is over."""
    waves: list[WaveView] = []
    """Active waves; all waves if only one plan is requested."""
    conflicts: list[str] = []


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """All plans that are kept, the newest first."""

    plans: list[PlanView]


class JobImpact(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a plan on one job."""

    job: str
    entitlement: str
    there: int
    """Its tasks on machines of the plan …"""
    tasks: int
    """… of this number of tasks of the job."""
    down: int
    """Tasks that already do not serve, for any reason."""
    budget: int
    """Number of tasks that may be unavailable."""
    most_in_a_wave: int
    rounds: int
    """Number of times that tasks must leave one after another, in the wave with most of them."""
    controller: str = ""
    """The controller that must approve; empty: none."""
    stay: bool = False
    """Its tasks may stay if its controller acknowledges no operation."""
    unplaced: int = 0
    """Tasks that have no other place now …"""
    reasons: list[str] = []
    """… and why."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the first wave that must wait for jobs which cannot spare it now (HC6)."""

    machine: str
    jobs: list[str]


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that a plan would have now."""

    name: str
    machines: int
    waves: list[int]
    """Machines of each wave."""
    ends: Ends
    tasks: int
    """Tasks on all its machines."""
    jobs: list[JobImpact]
    """Jobs with most of a budget at stake first; at most 200 …"""
    more_jobs: int = 0
    """… and the number of further jobs."""
    at_once: int = 0
    """Machines of the first wave that every job can spare at once."""
    held: list[Held] = []
    """The other machines, 100 at most, and the jobs they wait for until the deadline, if any."""
    share: float = 0.0
    """Share of the region's machines that are up."""
    conflicts: list[str] = []
    """Other plans and events for the same machines, jobs or parts."""
    warnings: list[str] = []
    """Why it is refused unless `despite` is set."""
    notes: list[str] = []


class Reported(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report that work on some machines of a plan is over."""

    machines: Annotated[list[Name], Meta(min_length=1, max_length=10_000)]


class GoOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to continue a paused plan."""

    without: bool = False
    """Continue without the machines that are not back."""


class PlacesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the core to a shard's process: find places for tasks of leaving machines."""

    tasks: dict[str, list[int]]
    """Job → its tasks that have to leave."""
    leave: list[str]
    """Machines that may not take the tasks."""


class JobPlaces(msgspec.Struct, frozen=True, kw_only=True):
    """The places that a job would get."""

    unplaced: int = 0
    reasons: list[str] = []


class PlacesFound(msgspec.Struct, frozen=True, kw_only=True):
    """Places by job; jobs of other processes are missing."""

    jobs: dict[str, JobPlaces] = {}
