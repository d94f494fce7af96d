"""Properties of a task's systemd unit: requested and in force."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Id, Reported, Words


class UnitProperty(Reported, frozen=True, kw_only=True):
    """One property, with its D-Bus name (org.freedesktop.systemd1(5))."""

    name: Id
    wanted: Words
    """The value of the next start, as JSON."""
    in_force: Words = ""
    """The value that systemd reports now; empty if there is no unit or no value."""


class UnitShown(Reported, frozen=True, kw_only=True):
    """All properties of a task's unit."""

    unit: Id
    properties: Annotated[list[UnitProperty], Meta(max_length=1024)]
