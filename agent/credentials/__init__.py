"""Credentials of tasks: held in memory, handed to systemd."""
