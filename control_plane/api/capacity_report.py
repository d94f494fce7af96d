"""The capacity report: granted, held, used and free capacity of the region."""

from __future__ import annotations

import msgspec


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Machines and their total resources."""

    machines: int = 0
    rru: float = 0.0
    memory_bytes: int = 0
    power_w: int = 0
    """Nominal."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One entitlement, business unit, machine type, data center or MSB."""

    name: str
    granted_machines: int = 0
    """Quotas in machines; only for entitlements and business units."""
    granted_rru: float = 0.0
    """Quotas in RRU."""
    all: Amount = Amount()
    """All machines; only for types, data centers and MSBs."""
    held: Amount = Amount()
    """Machines assigned to entitlements."""
    used: Amount = Amount()
    """Resources that tasks claim there; `machines` counts those with tasks."""
    free: Amount = Amount()
    """Machines of the free pool; only for types, data centers and MSBs."""


class LargestTask(msgspec.Struct, frozen=True, kw_only=True):
    """The largest task for which one machine of a type has room now."""

    machine_type: str
    memory_bytes: int
    rru: float


class StackProposal(msgspec.Struct, frozen=True, kw_only=True):
    """Small entitlements that could stack as reservations on one materialization (MO16)."""

    host_profile: str
    entitlements: list[str]
    held: int
    """Machines that they hold now."""
    needed: int
    """Machines of average size that their present use would need together."""


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity in pieces that are hard to use (CP8)."""

    entitlements: int = 0
    small: int = 0
    """Entitlements with a quota of ten machines at most …"""
    small_share: float = 0.0
    """… as a share of all …"""
    small_held: int = 0
    """… and the machines that they hold."""
    held: int = 0
    half_empty: int = 0
    """Machines held and less than half used, in RRU and in memory."""
    idle: int = 0
    """Machines of these without any task."""
    stranded_rru: float = 0.0
    """Free RRU on held machines without free memory."""
    stranded_memory_bytes: int = 0
    """Free memory on held machines without free RRU."""
    largest: list[LargestTask] = []
    stacks: list[StackProposal] = []
    """Stacks that would save machines, the largest saving first."""
    stacks_save: int = 0
    """Machines that all these stacks would save."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Every machine in exactly one class (CP11, EL6, EL10).

    Opportunistic capacity may be used by others until it is called back: `lent`, `idle`,
    `unused_quota` and `buffer`.
    """

    all: Amount = Amount()
    guaranteed: Amount = Amount()
    """Machines held under a quota, with tasks."""
    lent: Amount = Amount()
    """Machines on loan."""
    idle: Amount = Amount()
    """Machines held under a quota, without tasks, for instance after a job shrank."""
    unused_quota: Amount = Amount()
    """Free machines that are promised to entitlements below their quota."""
    buffer: Amount = Amount()
    """Free machines that are not promised."""
    unusable: Amount = Amount()
    """Machines that are down, or will be unavailable soon."""
    opportunistic_share: float = 0.0
    """Of all usable machines, by RRU."""
    guaranteed_share: float = 0.0


class PowerBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The power budget of a place, and what is in use there (AL22)."""

    place: str
    """Data center, MSB, row or rack, as a path."""
    budget_w: int
    limit_w: int
    """The budget times its overcommit factor; above it no further machine gets its first task."""
    used_w: int
    """Nominal draw of the machines there that have tasks."""


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The region at one moment."""

    at: float
    entitlements: list[Line] = []
    units: list[Line] = []
    """Each node of the hierarchy with its children; the first, without a name, is the root."""
    types: list[Line] = []
    datacenters: list[Line] = []
    msbs: list[Line] = []
    """Named `datacenter/msb`."""
    fragmentation: Fragmentation = Fragmentation()
    split: Split = Split()
    power: list[PowerBudget] = []
    """Places that have a budget, in their order."""
    short: list[str] = []
    """Quotas that exceed the machines of the region, as text."""
