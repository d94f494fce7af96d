"""What is wanted, what changes and what was found: printed, stored and read by the agent.

The agent reads `status.json` as its own `ProfileStatus`, so the names of `Report` and
`SettingReport` are part of a contract: fields are added, never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec


class ApplyOutcome(StrEnum):
    """Outcome of one setting of a profile."""

    APPLIED = "applied"
    """Read back as wanted (after a change, or by `verify`)."""
    ALREADY = "already"
    """Was as wanted before; nothing was written."""
    UNSUPPORTED = "unsupported"
    """This kernel lacks it, and the profile can do without."""
    PENDING_REBOOT = "pending_reboot"
    """Staged for the next boot; not in force."""
    FAILED = "failed"
    DRIFTED = "drifted"
    """Was applied; it was changed by hand since."""
    PARTIAL = "partial"
    """As much of it as there was; the profile takes that."""
    UNDONE = "undone"
    """Has its earlier value again."""


class ProfileState(StrEnum):
    """State of the machine with regard to the profile that was asked for last."""

    NONE = "none"
    APPLYING = "applying"
    VERIFIED = "verified"
    PENDING_REBOOT = "pending_reboot"
    DRIFTED = "drifted"
    DEGRADED = "degraded"


class Disruption(StrEnum):
    """What a change costs the users of the host, in rising order."""

    LIVE = "live"
    """In force at once; running tasks need not notice."""
    RESTART = "restart"
    """A service of the host is restarted."""
    DRAIN = "drain"
    """Not while tasks run."""
    KEXEC = "kexec"
    """A new kernel start without the firmware is enough; a full reboot does it too."""
    REBOOT = "reboot"

    @property
    def rank(self) -> int:
        """Its place in that order."""
        return list(Disruption).index(self)


def most_disruptive(needs: Iterable[Disruption]) -> Disruption:
    """Return the largest need, which brings all of them into force."""
    return max(needs, key=lambda need: need.rank, default=Disruption.LIVE)


class WantedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One value that a profile asks for."""

    setting: str
    """Its kind and its name there, such as `sysctl.vm.swappiness`."""
    value: str
    required: bool = True
    """Whether a kernel that lacks it cannot run the profile."""
    source: str = ""
    """The profile file that sets it, which may be a parent."""
    options: dict[str, str] = {}
    """What else its kind needs to apply it; each kind has its own keys."""


class ProfileText(msgspec.Struct, frozen=True):
    """The file of one profile as it was read: enough to render it again for the host of then."""

    name: str
    path: str
    text: str


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """One write of a run."""

    setting: str
    before: str
    after: str
    needs: Disruption = Disruption.LIVE
    why: str = ""
    options: dict[str, str] = {}
    """Those of the wanted value."""
    restarts: tuple[str, ...] = ()
    """Units that must be restarted before it is in force; each once, after all writes."""
    undo_setting: str = ""
    """What undo writes instead, where writing `before` back is not accepted: a sysctl that
    reads 0 because its twin is in force refuses the 0 (see `settings/sysctl.py`)."""
    undo_value: str = ""


class SettingReport(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as it was wanted and as it was read back."""

    setting: str
    outcome: ApplyOutcome
    wanted: str
    actual: str
    detail: str = ""
    took_ms: float = 0.0


class ReportedSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting came to in a switch, and how long it took."""

    setting: str
    outcome: ApplyOutcome
    took_ms: float


class Switched(msgspec.Struct, frozen=True, kw_only=True):
    """The last run that wrote anything, by which switches of a fleet are counted."""

    name: str
    generation: int = 0
    epoch: int = 0
    command: str
    state: ProfileState
    rolled_back: bool = False
    at: float
    """When it ended, in seconds since 1970."""
    took_ms: float
    settings: list[ReportedSwitch]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """State of the machine, with proof per setting."""

    name: str = ""
    """The profile that was asked for last."""
    generation: int = 0
    epoch: int = 0
    state: ProfileState = ProfileState.NONE
    detail: str = ""
    settings: list[SettingReport] = []
    took_ms: float = 0.0
    at: float = 0.0
    """Seconds since 1970."""
    effective: str = ""
    """The profile whose values are in force, which a failed switch does not change."""
    rolled_back: bool = False
    """The run failed and everything it had written was undone."""
    command: str = ""
    """apply, verify, rollback, resume, try, confirm, revert or repair: what this reports on."""
    boot_id: str = ""
    uptime_s: float = 0.0
    """When this was read back, in seconds since that boot: no step of the clock moves it."""
    switched: Switched | None = None
    """The last switch; a mere check of the host keeps it."""


def switch_of(report: Report, written: Iterable[str]) -> Switched:
    """Return what a run took that wrote these settings, each counted once."""
    names = set(written)
    return Switched(
        name=report.name,
        generation=report.generation,
        epoch=report.epoch,
        command=report.command,
        state=report.state,
        rolled_back=report.rolled_back,
        at=report.at,
        took_ms=report.took_ms,
        settings=[
            ReportedSwitch(setting=s.setting, outcome=s.outcome, took_ms=s.took_ms)
            for s in report.settings
            if s.setting in names
        ],
    )


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan` prints."""

    name: str
    needs: Disruption
    changes: list[SettingChange]
    missing: list[WantedSetting] = []
    """Required, and not in this kernel: applying would fail."""
    unsupported: list[WantedSetting] = []
    unchanged: int = 0


EXIT_CODES = {
    ProfileState.NONE: 0,
    ProfileState.VERIFIED: 0,
    ProfileState.APPLYING: 2,
    ProfileState.PENDING_REBOOT: 2,
    ProfileState.DRIFTED: 2,
    ProfileState.DEGRADED: 1,
}


def exit_code(report: Report) -> int:
    """Return what a command that ended with this report exits with (docs/sidekick.md)."""
    return 4 if report.rolled_back else EXIT_CODES[report.state]
