"""The record: which profile is applied, and what everything was before that."""

from __future__ import annotations

import msgspec

from sidekick.report import ProfileText, WantedSetting

SCHEMA = 2


class OwnedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the kernel command line that a profile put there (see `bootline`)."""

    group: str
    arguments: tuple[str, ...]
    displaced: tuple[str, ...] = ()
    """The host's own arguments of the group, which had its place."""
    late: bool = False
    """May linger: what it did is undone at run time."""
    before: str = ""
    """For the guard: the host's own `kernel.panic` before the first boot with it."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it was asked for: rendered, so that a boot can bring it back as it was."""

    name: str = ""
    """Empty for no profile: every original."""
    generation: int = 0
    epoch: int = 0
    wanted: tuple[WantedSetting, ...] = ()
    texts: tuple[ProfileText, ...] = ()
    """The files it was rendered from: `verify` renders them again for the host of then."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A reboot that sidekick asked for; kept until its purpose is seen to be met."""

    boot_id: str
    """Boot id of the boot that was left."""
    purpose: str
    """Which arguments it was to bring, for which generation."""
    way: str
    at: float


class Rebooted(msgspec.Struct, frozen=True, kw_only=True):
    """A boot that ended by a reboot of ours."""

    boot_id: str
    uptime_s: float
    """How long it had lasted, by its own monotonic clock."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last switch that was asked for, where it failed."""

    name: str
    generation: int = 0
    epoch: int = 0
    reason: str
    rolled_back: bool = True


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A profile that is reverted unless it is confirmed."""

    back: Target
    """The target that is restored."""
    boot_id: str
    until: float
    """By the monotonic clock of that boot; any other boot ends it too."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The durable memory of sidekick."""

    schema: int = SCHEMA
    boot_id: str = ""
    """The boot to which the applied values and the originals belong."""
    applied: Target | None = None
    originals: dict[str, str | None] = {}
    """What every setting was before the first profile that claimed it."""
    left: dict[str, str] = {}
    """Originals that the kernel did not take back: the next boot brings them."""
    boot: tuple[OwnedGroup, ...] = ()
    """What of the boot line is ours: staged, in force, or still to be taken off."""
    failure: Failure | None = None
    attempt: Attempt | None = None
    reboots: tuple[Rebooted | float, ...] = ()
    """Our reboots of late, oldest first: a guard against a loop. An earlier release noted the times
    of a clock that each boot may set otherwise."""
    trial: Trial | None = None
