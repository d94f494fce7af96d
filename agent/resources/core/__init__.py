"""Decisions about resources; pure."""
