"""Notices to tasks: their machine will be taken away, or lent capacity is short."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import (
    Count,
    HttpPath,
    Id,
    Moment,
    Name,
    Port,
    Reported,
    Seconds,
    Words,
    Written,
)

CAPACITY_OF_MAX = 8
"""The most entitlements whose capacity a task can ask about."""


class NoticeSettings(Written, frozen=True, kw_only=True):
    """How a task receives notices; they are always in `/run/twine-notice/notice.json`."""

    port: Port | None = None
    """The agent also sends the file by POST to this port of the task; None: it does not."""
    path: HttpPath = "/"
    """The path of the POST."""
    timeout_s: Seconds = 5.0
    """The agent repeats a POST that is not answered within this time."""
    capacity_of: Annotated[list[Name], Meta(max_length=CAPACITY_OF_MAX)] = []
    """Entitlements whose lent capacity the notices report."""


class HostNotice(Reported, frozen=True, kw_only=True):
    """Planned work on a machine that may remove its tasks."""

    id: Id
    kind: Id
    """`revoked` (its loan is called back), `maintenance`, `decommission`, `refresh`, …"""
    start: Moment
    """From when on tasks are moved away."""
    deadline: Moment | None = None
    """When remaining tasks are stopped, unless `tasks_survive`; None: not yet known."""
    tasks_survive: bool = False
    reason: Words = ""


class LentCapacity(Reported, frozen=True, kw_only=True):
    """Whether an entitlement has the lent machines that it wants (EL9)."""

    entitlement: Id
    state: Id
    """`full`, `short`, or `absent`: there is none, and the application runs with less."""
    machines: Count = 0
    wanted: Count = 0
    """Machines that it wants in addition to `machines`."""
    next_deadline: Moment | None = None
    """When the next machine is taken away."""


class HostNotices(Reported, frozen=True, kw_only=True):
    """All notices of a machine's tasks; one that is left out is withdrawn."""

    epoch: Count = 0
    """Leadership term of the sender."""
    notices: Annotated[list[HostNotice], Meta(max_length=1000)] = []
    capacity: Annotated[list[LentCapacity], Meta(max_length=1000)] = []
