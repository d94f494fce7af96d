"""The host's profile: the wanted one, the state of the machine, and the result of a switch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from agent.api.ranges import (
    COUNT_MAX,
    Count,
    Id,
    Milliseconds,
    Moment,
    Name,
    Reported,
    Words,
    Written,
)


class SettingOutcome(StrEnum):
    """Result of one setting of a profile."""

    APPLIED = "applied"
    ALREADY = "already"
    UNSUPPORTED = "unsupported"
    PENDING_REBOOT = "pending_reboot"
    FAILED = "failed"
    DRIFTED = "drifted"
    PARTIAL = "partial"
    """Applied to a part of its targets; the profile allows that."""
    UNDONE = "undone"


class SettingStatus(Reported, frozen=True, kw_only=True):
    """One setting of the profile: its wanted value, and the value that was read back."""

    setting: Id
    outcome: SettingOutcome
    wanted: Words
    actual: Words
    detail: Words = ""
    took_ms: Milliseconds = 0.0


class ProfileState(StrEnum):
    """Whether a machine runs the profile that was last requested."""

    NONE = "none"
    APPLYING = "applying"
    VERIFIED = "verified"
    PENDING_REBOOT = "pending_reboot"
    DRIFTED = "drifted"
    DEGRADED = "degraded"


class ProfileSpec(Written, frozen=True, kw_only=True):
    """The profile that a machine must run."""

    name: Name
    generation: Annotated[int, Meta(ge=1, le=COUNT_MAX)] = 1
    epoch: Count = 0
    allow_reboot: bool = False
    """Whether the machine may be rebooted for settings that need it."""
    text: Annotated[str, Meta(max_length=65_536)] = ""
    """The profile's text, if the host does not have it. The host stores it under its name, which
    ends with the beginning of its digest. Empty: the host has it."""


class SettingSwitch(Reported, frozen=True, kw_only=True):
    """Result of one setting in a switch, and how long it took."""

    setting: Id
    outcome: SettingOutcome
    took_ms: Milliseconds = 0.0


class ProfileSwitch(Reported, frozen=True, kw_only=True):
    """The last run of sidekick that changed the host. Metrics of switches are made from it."""

    name: Id = ""
    generation: Count = 0
    epoch: Count = 0
    command: Id = ""
    """apply, rollback, resume, try, revert or repair."""
    state: ProfileState = ProfileState.NONE
    """State of the machine after it."""
    rolled_back: bool = False
    at: Moment = 0.0
    """When it ended, in seconds since 1970 by the machine's clock."""
    took_ms: Milliseconds = 0.0
    settings: Annotated[list[SettingSwitch], Meta(max_length=10_000)] = []


class ProfileStatus(Reported, frozen=True, kw_only=True):
    """The profile a machine runs, with proof per setting."""

    name: Id = ""
    generation: Count = 0
    epoch: Count = 0
    state: ProfileState = ProfileState.NONE
    detail: Words = ""
    settings: Annotated[list[SettingStatus], Meta(max_length=10_000)] = []
    took_ms: Milliseconds = 0.0
    boot_id: Id = ""
    """Boot of the host in which this was read back."""
    uptime_s: Moment = 0.0
    """Seconds since that boot at which it was read back; 0 from an earlier sidekick."""
    switched: ProfileSwitch | None = None
    """The last switch. A check of the host does not change it. None before the first switch."""
