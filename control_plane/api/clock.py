"""The stored form of the date (`runtime/date.py`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api.ranges import Id


class ClockAnchor(msgspec.Struct, frozen=True, kw_only=True):
    """The date at which a boot of the host is assumed to have begun."""

    schema: int = 1
    boot_id: Id
    """The kernel's boot id, which changes with each boot."""
    booted_at: Annotated[float, Meta(ge=-1e11, le=1e11)]
    """Seconds since 1970; negative if the clock was never set."""
