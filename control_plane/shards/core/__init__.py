"""Decisions of this room, as pure functions of values: no runtime, no I/O."""
