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
"""Maximum size of a profile in bytes, as in sidekick."""
ProfileText = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]


class ProfileProposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to the host profile of an entitlement: a TOML file that extends the present one."""

    text: ProfileText
    reason: Text
    at_once: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Number of machines that switch together."""
    gate_s: Annotated[float, Meta(ge=0, le=86_400)] = 60.0
    """Seconds for which profile and tasks of a machine must be healthy before the next one
    switches."""
    failures: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Number of failed machines after which all machines are rolled back."""


class ProfileState(StrEnum):
    """The state of a profile's rollout."""

    ROLLING = "rolling"
    DONE = "done"
    """All machines of the entitlement have it, and new machines will get it."""
    BACK = "back"
    """It failed or is no longer wanted: machines are rolled back, a few at a time."""
    RETURNED = "returned"


class ProfileVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One text of a profile; its name never means another text."""

    schema: int = 1
    name: Name
    """Name of the extended profile, and the beginning of the digest."""
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
    """… and the former profile, for a rollback."""
    at_once: Count = 1
    gate_s: Moment = 60.0
    failures: Count = 1
    state: ProfileState = ProfileState.ROLLING
    trial: tuple[Id, ...] = ()
    """Machines that are switching now."""
    failed: tuple[Id, ...] = ()
    reason: Words = ""
    """Why it was requested, or why it is rolled back."""
    by: Id = ""
    at: Moment = 0.0
    ended: Moment = 0.0
    unproved: bool = False
    """It ended while the entitlement held no machine, so no machine verified it."""


class ProfileView(msgspec.Struct, frozen=True, kw_only=True):
    """The host profile of an entitlement, and the progress of a change."""

    entitlement: str
    profile: str
    """The profile of machines that join the entitlement."""
    rollout: ProfileRollout | None = None
    """The last rollout."""
    machines: dict[str, Few] = {}
    """Profile → number of machines of the entitlement that should have it …"""
    proved: dict[str, Few] = {}
    """… and number of machines that have verified it."""
    waiting: list[str] = []
    """What the switching machines wait for."""
    text: str = ""
    """Text of the wanted profile, if an owner proposed it."""


class SettingTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time that hosts took to change a kind of setting, in milliseconds (Figure 17)."""

    setting: str
    switches: int
    p50_ms: float
    p90_ms: float


class ProfileStats(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the last switch of each machine that answers, by kind of setting and in total."""

    machines: int
    settings: list[SettingTimes]


def version_name(extends: str, text: str) -> str:
    """Return the name of a text: the extended profile, and the beginning of the digest."""
    return f"{extends[:50]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def digest_of(text: str) -> str:
    """Return the digest of a text, in the form of image digests."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
