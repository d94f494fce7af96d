"""Which scheduler and allocator shard owns an entitlement (docs/adr/0150)."""

from __future__ import annotations

import msgspec

from agent.api import Count, Name


class EntitlementOwner(msgspec.Struct, frozen=True, kw_only=True):
    """An entitlement's shard; of one without a record it is shard 0."""

    schema: int = 1
    entitlement: Name
    shard: Count = 0
    moved: Count = 0
    """Moves of the region up to the last one of this entitlement, that one included; 0: it never
    moved. Kept after the entitlement is gone: hosts were told of it."""


class ShardLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard has to do; the one with the least gets a new entitlement."""

    shard: int
    machines: int = 0
    """Machines of its entitlements: what costs a shard most is to follow them."""
    entitlements: list[str] = []
    """Those that have machines of their own, by name."""
    jobs: int = 0
    tasks: int = 0
    """Tasks that the records of its jobs have."""
    moving: list[str] = []
    """Entitlements that are being moved to it."""


class ShardLoads(msgspec.Struct, frozen=True, kw_only=True):
    """The shards of the region."""

    shards: list[ShardLoad]
    term: int
    """Number of the term in which they own their entitlements."""


class ShardMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which shard shall own an entitlement."""

    to: Count


class ShardMoved(msgspec.Struct, frozen=True, kw_only=True):
    """What a move did, or what it would do."""

    entitlement: Name
    from_shard: int
    to_shard: int
    jobs: list[str]
    machines: int
    done: bool
    """False: it was planned only, or the entitlement was there already."""
