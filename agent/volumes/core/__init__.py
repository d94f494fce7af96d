"""Decisions about volumes; pure."""
