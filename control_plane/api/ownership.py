"""Which scheduler and allocator shard owns an entitlement (docs/adr/0150)."""

from __future__ import annotations

import msgspec

from agent.api import Count, Name


class Ownership(msgspec.Struct, frozen=True, kw_only=True):
    """An entitlement's shard; of one without a record it is shard 0."""

    schema: int = 1
    entitlement: Name
    shard: Count = 0
    moved: Count = 0
    """Moves of the region up to the last one of this entitlement, that one included; 0: it never
    moved. Kept after the entitlement is gone: hosts were told of it."""
