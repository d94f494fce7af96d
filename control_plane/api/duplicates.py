"""Hosts that have the identity of another one (docs/adr/0107)."""

from __future__ import annotations

import msgspec


class Duplicate(msgspec.Struct, frozen=True, kw_only=True):
    """A clone: another host with the identity of a machine, as it is stored and shown."""

    schema: int = 1
    machine: str
    boot_id: str
    """Boot id of the clone."""
    address: str
    """Address from which the clone called, or at which it answers."""
    other_boot_id: str
    """Boot id of the host that keeps the identity."""
    at: float
    """When it was found, in seconds since 1970."""


class Duplicates(msgspec.Struct, frozen=True, kw_only=True):
    """All clones, by the name of their machine."""

    duplicates: list[Duplicate]
