"""Decisions about the lease; pure."""
