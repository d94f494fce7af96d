"""What a user may do, as pure functions."""
