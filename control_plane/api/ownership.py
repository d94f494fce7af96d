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
    """Moves of the region up to the last one of this entitlement, that one included; 0: it never
    moved. Kept after the entitlement is gone: hosts have it."""
    moving_to: Count | None = None
    """The shard that is going to get it from the process of this one; no shard owns it then."""


class EntitlementRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's process reports that it does nothing more in an entitlement that is moving."""

    schema: int = 1
    entitlement: Name


class RoleProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that leads a role, as written at its election (docs/adr/0153)."""

    schema: int = 1
    role: str
    """`all`, `core`, or `shard-N`."""
    epoch: Count
    """Of all roles together: it rises with each election."""
    life: str
    """16 random hexadecimal digits of this start of the process."""
    url: str = ""
    """Where the process of a shard takes requests."""
    shards: Count = 1
    """Of a core or a whole control plane: shards of the region."""
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
    """It is regional: it owns only entitlements that are pinned to this region. Empty: global."""
    pinned: dict[str, str] = {}
    """Those of its entitlements that are pinned to a region → the region."""
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
    """False: it was planned only, or the entitlement was there already."""
