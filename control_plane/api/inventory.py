"""Requests to the resource brokers, and their answers."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Id, Location, Name
from control_plane.api.machines import EventKind, Hardware, MachineRecord, MachineState
from control_plane.api.policy import MAX_LABELS, Expression, LabelName, Labels

Text = Annotated[str, Meta(min_length=1, max_length=500)]
Seconds = Annotated[float, Meta(ge=0, le=400 * 86_400)]


class MachineScope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A selection of machines by type, place and state; all given fields must match (MO2, MO21)."""

    region: Id | None = None
    datacenter: Id | None = None
    msb: Id | None = None
    row: Id | None = None
    rack: Id | None = None
    machine_type: Id | None = None
    entitlement: Id | None = None
    """Empty: the free pool."""
    cluster: Id | None = None
    """The historic cluster that they were bought for."""
    state: MachineState | None = None
    unavailable: bool | None = None
    """Whether an event makes it unusable, now or soon."""
    where: Expression | None = None
    """A requirement that the machine meets (docs/requirements-grammar.md)."""


class MachineChange(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of one machine."""

    name: str
    record: MachineRecord | None
    """None: it no longer belongs to this broker."""
    revision: int
    """Pass the last one as `after` to get the changes that follow."""


class BrokerMachines(msgspec.Struct, frozen=True, kw_only=True):
    """A broker's machines, or what changed about them.

    Without `after`: a page of records; take `revision` from the first page, read all pages, then
    ask for the changes after it. With `after`: the changes. A change may be older than the record
    on a later page; the changes after it correct that.
    """

    revision: int
    machines: list[MachineRecord] = []
    next: str = ""
    """Pass it as `name_after` for the next page; empty: this is the last page."""
    changes: list[MachineChange] = []
    lost: bool = False
    """The changes after the requested revision are no longer available: list again."""


class BrokerView(msgspec.Struct, frozen=True, kw_only=True):
    """One data center's broker."""

    datacenter: str
    machines: int
    free: int
    revision: int


class BrokerViews(msgspec.Struct, frozen=True, kw_only=True):
    """All brokers of the region."""

    brokers: list[BrokerView]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that a command changed, as they are now."""

    machines: list[MachineRecord]


class OfMachines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of requests about machines: named ones, or all of a scope."""

    machines: Annotated[list[Name], Meta(max_length=10_000)] = []
    scope: MachineScope | None = None


class Drain(OfMachines, frozen=True, kw_only=True):
    """An announcement that machines will be unavailable: named ones, or all of a scope."""

    kind: EventKind = EventKind.MAINTENANCE
    reason: Text
    start_in_s: Seconds = 0.0
    """Seconds from now until tasks begin to move away."""
    deadline_s: Seconds | None = None
    """Seconds after the start at which the work begins even if tasks still run there."""
    duration_s: Seconds | None = None
    """Seconds that the work takes, from the deadline on."""
    tasks_survive: bool = False
    """Tasks run on meanwhile, but cannot be reached: a switch is replaced."""


class Undrain(OfMachines, frozen=True, kw_only=True):
    """An announcement that the work on machines is over or cancelled."""


class Relabel(OfMachines, frozen=True, kw_only=True):
    """A request to set and remove labels of machines: named ones, or all of a scope."""

    set: Labels = {}
    remove: Annotated[list[LabelName], Meta(max_length=MAX_LABELS)] = []


class Lend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to lend a whole, empty machine to another entitlement (EL3)."""

    machine: Name
    borrower: Name
    donor: Id = ""
    """Entitlement that has it now; empty: the free pool."""


class Revoke(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to call lent machines back."""

    machines: Annotated[list[Name], Meta(min_length=1, max_length=10_000)]
    return_within_s: Seconds = 300.0


class InventoryMachine(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One machine of a list."""

    machine: str
    location: Location
    machine_type: str
    hardware: Hardware
    cluster: str = ""
    address: str = ""
    labels: dict[str, str] | None = None
    """None: the list has none, and existing labels stay."""


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an inventory changed, or would."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    dry_run: bool = False
    pending: bool = False
    """The list is accepted and not yet completely written. The import continues automatically, also
    after a restart. Until then no machine is moved, removed or imported."""
