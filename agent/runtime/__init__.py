"""What every room stands on: records and their journal, lanes, units, events, timers."""
