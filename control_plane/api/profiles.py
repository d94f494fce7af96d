"""Host profiles that owners propose, as written, stored and shown."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count, DigestStr, Few, Id, Moment, Name, Words
from control_plane.api.inventory import Text

TEXT_MAX = 65_536
"""Bytes of a profile, as sidekick has it."""
ProfileText = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]


class ProfileWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to the host profile of an entitlement: a TOML file that extends what it runs."""

    text: ProfileText
    reason: Text
    at_once: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Machines that switch to it together."""
    gate_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """Seconds for which profile and tasks of a machine must be healthy before the next one
    switches."""
    failures: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Machines that fail before all go back."""


class ProfileState(StrEnum):
    """How far a profile is."""

    ROLLING = "rolling"
    DONE = "done"
    """All machines of the entitlement run it, and new ones will."""
    BACK = "back"
    """It failed, or is no longer wanted: machines go back, a few at a time."""
    RETURNED = "returned"


class ProfileVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One text, permanently under its name."""

    schema: int = 1
    name: Name
    """The profile that it extends, and the beginning of its digest."""
    digest: DigestStr
    extends: Name
    text: ProfileText
    entitlement: Name
    by: Id = ""
    at: Moment = 0.0
    reason: Words = ""


class ProfileRollout(msgspec.Struct, frozen=True, kw_only=True):
    """How the machines of one entitlement switch to a profile."""

    schema: int = 1
    entitlement: Name
    name: Name
    """The profile that is wanted …"""
    base: Name
    """… and the one before, to go back to."""
    at_once: Count = 1
    gate_s: Moment = 60.0
    failures: Count = 1
    state: ProfileState = ProfileState.ROLLING
    trial: tuple[Id, ...] = ()
    """Machines that switch now."""
    failed: tuple[Id, ...] = ()
    reason: Words = ""
    """Why it was wanted, or why it goes back."""
    by: Id = ""
    at: Moment = 0.0
    ended: Moment = 0.0
    unproved: bool = False
    """It ended when the entitlement held no machine that could prove it."""


class ProfileView(msgspec.Struct, frozen=True, kw_only=True):
    """The host profile of an entitlement, and the way to the next one."""

    entitlement: str
    profile: str
    """The profile of machines that join the entitlement."""
    rollout: ProfileRollout | None = None
    """The last one."""
    machines: dict[str, Few] = {}
    """Profile → how many machines of the entitlement are to run it …"""
    proved: dict[str, Few] = {}
    """… and how many have proved that they do."""
    waiting: list[str] = []
    """What the switching machines wait for."""
    text: str = ""
    """Of the profile that is wanted, if it was proposed."""


class SettingTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long hosts took to change a kind of setting, in milliseconds (Figure 17)."""

    setting: str
    switches: int
    p50_ms: float
    p90_ms: float


class ProfileStats(msgspec.Struct, frozen=True, kw_only=True):
    """The last switch of each machine that answers, by kind of setting and as a whole."""

    machines: int
    settings: list[SettingTimes]


def version_name(extends: str, text: str) -> str:
    """Return the name of a text: the profile it extends, and the beginning of its digest."""
    return f"{extends[:50]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of(text: str) -> str:
    """Return the digest of a text, as images have it."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
