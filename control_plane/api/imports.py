"""An import of machines, as it is stored until it is completely written."""

from __future__ import annotations

import msgspec

from control_plane.api.inventory import InventoryMachine


class ImportRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Some machines of a list, all of one data center."""

    machines: list[InventoryMachine]
    schema: int = 1


class ImportDecision(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Accepts a list of machines: it is valid from this write on."""

    simulated: bool
    """Its new machines have no agents and count as up at once."""
    time: float
    """Time of the decision, in seconds since 1970."""
    schema: int = 1
