"""Decisions about intents: pure functions of what was written, of the tasks and of the time."""
