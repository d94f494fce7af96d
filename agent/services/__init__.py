"""Loops that observe, ask `core` what to do, and do it through `machine`."""
