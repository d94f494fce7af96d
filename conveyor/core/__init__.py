"""Decisions of continuous delivery, as pure functions of values: no clock, no I/O."""
