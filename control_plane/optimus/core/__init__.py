"""Which work runs: pure functions of values."""
