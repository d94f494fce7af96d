"""Decisions about calls, as pure functions."""
