"""Scheduler and allocator shards, which shard owns each entitlement, and what shards may own."""
