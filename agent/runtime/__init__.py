"""What every room uses: records and their journal, lanes, units, events, timers."""
