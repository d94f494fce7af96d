"""Limits on how fast the control plane stops, moves or deletes, and what they hold back."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from control_plane.api.inventory import Text

OVERRIDE_MAX_S = 86_400.0


class LimitName(StrEnum):
    """The limited operations."""

    STOPS = "stops"
    """The scheduler stops tasks on machines."""
    CAPPED_MOVES = "capped-moves"
    """The scheduler moves tasks off machines whose power is capped."""
    CAPACITY = "capacity"
    """The scheduler stops tasks voluntarily in a data center that has lost much capacity."""
    TAKE_AWAY = "take-away"
    """The broker takes machines from entitlements."""
    MARK_DOWN = "mark-down"
    """The health check service declares machines down."""
    PROFILES = "profiles"
    """Machines switch to another host profile."""
    REBALANCE = "rebalance"
    """The ReBalancer moves tasks."""
    DELETES = "deletes"
    """A user deletes jobs, entitlements, machines or images."""


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, the number of operations that passed, and those that it holds back."""

    name: LimitName
    what: str
    per_s: float
    burst: int
    passed: int
    """Operations since the start of this process."""
    held: int
    """Operations that wait for it now."""
    refused: int
    """Operations that it held back since the start of this process."""
    reason: str = ""
    """Why it holds operations back; empty: it does not."""
    lifted_for_s: float | None = None
    """Seconds for which it is still lifted by an operator; None: it is in force."""
    lifted_by: str = ""
    lifted_why: str = ""


class LimitViews(msgspec.Struct, frozen=True, kw_only=True):
    """All limits."""

    limits: list[LimitView]


class Lift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to lift a limit for a while; 0 s restores it."""

    for_s: Annotated[float, Meta(ge=0, le=OVERRIDE_MAX_S)] = 600.0
    reason: Text
