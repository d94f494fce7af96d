"""Decisions about rights, certificates and clones, as pure functions of values."""
