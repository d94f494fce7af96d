"""A task's unit as it is asked of systemd, and as systemd has it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import Id, Reported, Words


class UnitProperty(Reported, frozen=True, kw_only=True):
    """One property; names are those of D-Bus (org.freedesktop.systemd1(5))."""

    name: Id
    wanted: Words
    """What the next start asks for, as JSON."""
    in_force: Words = ""
    """The value that systemd reports now; empty without a unit, or where it reports none."""


class UnitShown(Reported, frozen=True, kw_only=True):
    """All properties of a task's unit."""

    unit: Id
    properties: Annotated[list[UnitProperty], Meta(max_length=1024)]
