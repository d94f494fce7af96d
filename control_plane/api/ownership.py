"""Which scheduler and allocator shard owns an entitlement (docs/adr/0150)."""

from __future__ import annotations

import msgspec

from agent.api import Count, Name


class EntitlementOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The shard of an entitlement; without a record it is shard 0."""

    schema: int = 1
    entitlement: Name
    shard: Count = 0
    moved: Count = 0
    """Number of the region's move that was the last one of this entitlement; 0: it never moved.
    Kept after the entitlement is removed, because hosts remember it."""
    moving_to: Count | None = None
    """The shard to which it is being moved; meanwhile no shard owns it."""


class EntitlementRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's process has stopped all work for an entitlement that is being moved."""

    schema: int = 1
    entitlement: Name


class RoleProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that leads a role, as written at its election (docs/adr/0153)."""

    schema: int = 1
    role: str
    """`all`, `core`, or `shard-N`."""
    epoch: Count
    """Election number, counted over all roles."""
    life: str
    """16 random hexadecimal digits that identify this run of the process."""
    url: str = ""
    """URL at which a shard's process accepts requests."""
    shards: Count = 1
    """Number of the region's shards; only for roles `core` and `all`."""
    host: str = ""
    since: float = 0.0
    """Seconds since 1970."""


class ShardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a shard."""

    shard: int
    machines: int = 0
    """Machines of its entitlements: following them is a shard's largest cost."""
    entitlements: list[str] = []
    """Entitlements with machines of their own, by name."""
    jobs: int = 0
    tasks: int = 0
    """Tasks that the records of its jobs have."""
    moving: list[str] = []
    """Entitlements that are being moved to it."""
    region: str = ""
    """Region of a regional shard, which owns only entitlements pinned to it. Empty: global."""
    pinned: dict[str, str] = {}
    """Its entitlements that are pinned to a region → the region."""
    load: int = 0
    """Sum over its entitlements of the larger of held machines and quota in machines. The shard
    with the least gets a new entitlement. Unused entitlements have no shard and do not count."""
    host: str = ""
    """Last address of its process; empty: it is a shard of the core's process."""
    since: float | None = None
    """Since when that process leads, in seconds since 1970."""


class ShardLoads(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of the region."""

    shards: list[ShardLoad]
    term: int
    """Number of the term in which they own their entitlements."""


class ShardMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to move an entitlement to another shard."""

    to: Count


class ShardMoved(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a move, or of a dry run."""

    entitlement: Name
    from_shard: int
    to_shard: int
    jobs: list[str]
    machines: int
    done: bool
    """False: it was only planned, or the entitlement was already there."""
