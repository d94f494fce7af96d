"""Decisions about tasks; pure."""
