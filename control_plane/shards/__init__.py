"""Scheduler and allocator shards: which of them owns which entitlement."""
