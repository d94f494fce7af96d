"""Requests to the health check service, and its answers."""

from __future__ import annotations

import msgspec

from control_plane.api.inventory import OfMachines, Text
from control_plane.api.machines import MachineState


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """A machine whose state is not decided yet, although it is silent, or answers again."""

    machine: str
    state: MachineState
    silent_s: float
    reason: str
    left_s: float
    """Seconds until the state is decided, if nothing changes."""
    part: str = ""
    """The rack, MSB, data center or region that looks cut off; empty: the machine alone."""


class HeldBackMachines(msgspec.Struct, frozen=True, kw_only=True):
    """All machines that are held back, by name."""

    machines: list[HeldBack]


class ConfirmDown(OfMachines, frozen=True, kw_only=True):
    """An operator's confirmation that silent machines are down; no delay applies then."""

    reason: Text


class ConfirmedDown(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that are declared down now, by name."""

    machines: list[str]
