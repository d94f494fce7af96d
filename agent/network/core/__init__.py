"""Decisions about networks; pure."""
