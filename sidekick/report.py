"""Wanted values, changes and results of runs: printed, stored, and read by the agent.

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
    """This kernel lacks it, and the profile does not require it."""
    PENDING_REBOOT = "pending_reboot"
    """Staged for the next boot; not in force."""
    FAILED = "failed"
    DRIFTED = "drifted"
    """Was applied; it was changed by hand since."""
    PARTIAL = "partial"
    """Less than wanted; the profile accepts that."""
    UNDONE = "undone"
    """Has its earlier value again."""


class ProfileState(StrEnum):
    """State of the machine in relation to the profile that was requested last."""

    NONE = "none"
    APPLYING = "applying"
    VERIFIED = "verified"
    PENDING_REBOOT = "pending_reboot"
    DRIFTED = "drifted"
    DEGRADED = "degraded"


class Disruption(StrEnum):
    """What a change disrupts on the host, in rising order."""

    LIVE = "live"
    """In force at once, without an interruption of running tasks."""
    RESTART = "restart"
    """A service of the host is restarted."""
    DRAIN = "drain"
    """Not possible while tasks run."""
    KEXEC = "kexec"
    """A new kernel start without the firmware is enough; a full reboot does it too."""
    REBOOT = "reboot"

    @property
    def rank(self) -> int:
        """Its place in that order."""
        return list(Disruption).index(self)


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
    """Further values that its kind needs to apply it; each kind has its own keys."""


class ProfileText(msgspec.Struct, frozen=True):
    """The text of one profile file, from which `verify` can render the profile again."""

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
    """The setting that undo writes if the kernel refuses `before`: a sysctl that reads 0 because
    its counterpart is in force refuses the 0 (see `settings/sysctl.py`)."""
    undo_value: str = ""


class SettingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted and the observed value of one setting."""

    setting: str
    outcome: ApplyOutcome
    wanted: str
    actual: str
    detail: str = ""
    took_ms: float = 0.0


class ReportedSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one setting in a switch, and its duration."""

    setting: str
    outcome: ApplyOutcome
    took_ms: float


class Switched(msgspec.Struct, frozen=True, kw_only=True):
    """The last run that wrote anything; the control plane counts switches by it."""

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
    """apply, verify, rollback, resume, try, confirm, revert or repair."""
    boot_id: str = ""
    uptime_s: float = 0.0
    """When this was read back, in seconds since that boot; independent of clock steps."""
    switched: Switched | None = None
    """The last switch; a check of the host does not change it."""


def switch_of(report: Report, written: Iterable[str]) -> Switched:
    """Return the durations of a run for the settings that it wrote, each once."""
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
    """The output of `plan`."""

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
    """Return the exit code of a command that ended with this report (docs/sidekick.md)."""
    return 4 if report.rolled_back else EXIT_CODES[report.state]
