"""Identities: of the host and of its tasks, their keys, and the check for clones."""
