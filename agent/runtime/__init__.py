"""Base of every room: records and their journal, lanes, units, events, timers."""
