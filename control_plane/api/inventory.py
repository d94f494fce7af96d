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
    """Machines by what they are and where: all that is given must hold (MO2, MO21)."""

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
    """Whether an event keeps it from use, or will soon."""
    where: Expression | None = None
    """A requirement that it meets (docs/requirements-grammar.md)."""


class MachineChange(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of one machine."""

    name: str
    record: MachineRecord | None
    """None: it is no longer this broker's."""
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
    """Pass it as `name_after` for the page that follows; empty: this was the last."""
    changes: list[MachineChange] = []
    lost: bool = False
    """Changes after the asked revision are gone: list again."""


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


class Drain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines are going to be unavailable on purpose: named ones, or all of a scope."""

    machines: Annotated[list[Name], Meta(max_length=10_000)] = []
    scope: MachineScope | None = None
    kind: EventKind = EventKind.MAINTENANCE
    reason: Text
    start_in_s: Seconds = 0.0
    """When tasks begin to move away, from now."""
    deadline_s: Seconds | None = None
    """When the work begins even if tasks still run there, after the start."""
    duration_s: Seconds | None = None
    """How long it takes, from the deadline on."""
    tasks_survive: bool = False
    """Tasks run on meanwhile, but cannot be reached: a switch is replaced."""


class Undrain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work on these machines is over or cancelled."""

    machines: Annotated[list[Name], Meta(max_length=10_000)] = []
    scope: MachineScope | None = None


class Relabel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machines get labels, or lose some: named ones, or all of a scope."""

    machines: Annotated[list[Name], Meta(max_length=10_000)] = []
    scope: MachineScope | None = None
    set: Labels = {}
    remove: Annotated[list[LabelName], Meta(max_length=MAX_LABELS)] = []


class Lend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole, empty machine goes to another entitlement for a while (EL3)."""

    machine: Name
    borrower: Name
    donor: Id = ""
    """Entitlement that has it now; empty: the free pool."""


class Revoke(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lent machines are called back."""

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
    """The list is accepted, and not yet written completely. That continues by itself, also after a
    restart. Until then no machine is moved, removed or imported."""
