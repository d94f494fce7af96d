"""Decisions about the host as a whole; pure."""
