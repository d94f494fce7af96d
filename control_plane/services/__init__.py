"""The actors: loops that observe, ask `core` what to do, and do it."""
