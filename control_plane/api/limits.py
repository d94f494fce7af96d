"""How fast the control plane may destroy anything, and what is held back."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from control_plane.api.inventory import Text

OVERRIDE_MAX_S = 86_400.0


class LimitName(StrEnum):
    """The limited operations: one for each component that destroys."""

    STOPS = "stops"
    """The scheduler stops tasks on machines."""
    CAPPED_MOVES = "capped-moves"
    """The scheduler moves tasks off machines whose power is capped."""
    CAPACITY = "capacity"
    """The scheduler stops tasks on purpose in a data center that has already lost much."""
    TAKE_AWAY = "take-away"
    """The broker takes machines from entitlements."""
    MARK_DOWN = "mark-down"
    """The health check service declares machines down."""
    PROFILES = "profiles"
    """Machines are brought to another host profile."""
    REBALANCE = "rebalance"
    """The ReBalancer has tasks move."""
    DELETES = "deletes"
    """A user deletes jobs, entitlements, machines or images."""


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, what passed it and what it holds back."""

    name: LimitName
    what: str
    per_s: float
    burst: int
    passed: int
    """Since the start of this process."""
    held: int
    """What waits for it now."""
    refused: int
    """How often it held something back since the start of this process."""
    reason: str = ""
    """Why it holds something back; empty: it does not."""
    lifted_for_s: float | None = None
    """Seconds for which an operator still lifts it; None: it is in force."""
    lifted_by: str = ""
    lifted_why: str = ""


class LimitViews(msgspec.Struct, frozen=True, kw_only=True):
    """All limits."""

    limits: list[LimitView]


class Lift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator lifts a limit for a while; 0 s: it holds again."""

    for_s: Annotated[float, Meta(ge=0, le=OVERRIDE_MAX_S)] = 600.0
    reason: Text
