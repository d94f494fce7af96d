"""Decisions about loans and buffers: pure functions of values."""
