"""What somebody may do, as pure functions."""
