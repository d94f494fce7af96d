"""The record: which profile is applied, and the original value of each setting."""

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
    """Whether it may stay on the line after its release: its effect is undone at run time."""
    before: str = ""
    """For the guard: the host's own `kernel.panic` before the first boot with it."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A requested profile with its rendered values, so that a boot restores exactly these."""

    name: str = ""
    """Empty for no profile: every original is restored."""
    generation: int = 0
    epoch: int = 0
    wanted: tuple[WantedSetting, ...] = ()
    texts: tuple[ProfileText, ...] = ()
    """The files it was rendered from: `verify` renders them again with the facts of that time."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """A reboot that sidekick requested; kept until its effect is verified."""

    boot_id: str
    """Boot id of the boot that was left."""
    purpose: str
    """The arguments that the reboot must bring, and the generation."""
    way: str
    at: float


class Rebooted(msgspec.Struct, frozen=True, kw_only=True):
    """A boot that ended by a reboot of sidekick."""

    boot_id: str
    uptime_s: float
    """How long it had lasted, by its own monotonic clock."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last requested switch, if it failed."""

    name: str
    generation: int = 0
    epoch: int = 0
    reason: str
    rolled_back: bool = True


def failure_of(target: Target, reason: str, *, rolled_back: bool) -> Failure:
    """Return the failure of the switch to a target."""
    return Failure(
        name=target.name,
        generation=target.generation,
        epoch=target.epoch,
        reason=reason,
        rolled_back=rolled_back,
    )


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
    """The value of each setting before the first profile that claimed it."""
    devices: dict[str, str] = {}
    """The device that an original is of (`Setting.device`), for settings of devices."""
    left: dict[str, str] = {}
    """Originals that the kernel refused: the next boot restores them."""
    boot: tuple[OwnedGroup, ...] = ()
    """Sidekick's groups on the boot line: staged, in force, or still to be removed."""
    failure: Failure | None = None
    attempt: Attempt | None = None
    reboots: tuple[Rebooted | float, ...] = ()
    """Recent reboots by sidekick, oldest first: a guard against a loop. An earlier release recorded
    wall-clock times (`float`), which a boot may change."""
    trial: Trial | None = None
    finished: int = 0
    """Number of the last run that ended. If its journal exists still, the run was killed between
    this record and the removal of the journal."""
