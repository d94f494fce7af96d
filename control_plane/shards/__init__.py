"""Scheduler and allocator shards, and which shard owns each entitlement."""
