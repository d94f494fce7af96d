"""Decides which work runs: pure functions of values."""
