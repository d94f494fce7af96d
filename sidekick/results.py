"""What one run wrote, the outcome of each setting, and the report made of them."""

from __future__ import annotations

from msgspec.structs import replace

from sidekick.boot import LINE
from sidekick.observe import LEFT_TO_BOOT
from sidekick.record import Record, Target
from sidekick.report import (
    ApplyOutcome,
    ProfileState,
    Report,
    SettingChange,
    SettingReport,
    Switched,
    switch_of,
)
from sidekick.setting import Applied, Host
from sidekick.state import StateFolder


class RunResults:
    """The writes of one run in their order, and the report of each setting."""

    def __init__(self, host: Host, state: StateFolder, target: Target, command: str) -> None:
        self._host = host
        self._state = state
        self._target = target
        self._command = command
        self._began = host.monotonic()
        self.written: list[SettingChange] = []
        self.reports: dict[str, SettingReport] = {}

    def record_attempt(self, change: SettingChange) -> None:
        """Record that a change is about to be written, and drop an earlier write of its setting."""
        self.written = [c for c in self.written if c.setting != change.setting] + [change]

    def record_result(
        self, change: SettingChange, applied: Applied, took_s: float, *, wanted: bool
    ) -> None:
        """Record the result of a write; `wanted` is whether the profile asks for the setting."""
        took_ms = took_s * 1000
        outcome = applied.outcome
        fields = {"setting": change.setting, "before": change.before, "after": change.after}
        more = {"outcome": outcome, "took_ms": took_ms}
        self._host.log.info("setting changed", extra=fields | more)
        if outcome is ApplyOutcome.APPLIED and not wanted:
            outcome = ApplyOutcome.UNDONE
        self.reports[change.setting] = SettingReport(
            setting=change.setting,
            outcome=outcome,
            wanted=change.after,
            actual=applied.actual,
            detail=applied.detail,
            took_ms=round(took_ms, 3),
        )

    def record_left_to_boot(self, change: SettingChange) -> None:
        """Record that the next boot restores an original that the kernel refused."""
        self.written = [c for c in self.written if c.setting != change.setting]
        made = self.reports[change.setting]
        outcome, detail = ApplyOutcome.PENDING_REBOOT, f"{made.detail}; {LEFT_TO_BOOT}"
        self.reports[change.setting] = replace(made, outcome=outcome, detail=detail)

    def record_verified(self, report: SettingReport) -> None:
        """Record the report of a setting that the run did not have to change."""
        if report.setting not in self.reports or report.setting == LINE:
            already = report.outcome is ApplyOutcome.APPLIED
            self.reports[report.setting] = (
                replace(report, outcome=ApplyOutcome.ALREADY) if already else report
            )

    def record_undone(self, change: SettingChange) -> None:
        """Record that a change was undone; the report of a refused one keeps its reason."""
        made = self.reports[change.setting]
        if made.outcome is not ApplyOutcome.FAILED:
            made = replace(made, outcome=ApplyOutcome.UNDONE, actual=change.before, detail="")
        self.reports[change.setting] = made

    def record_undo_failure(self, change: SettingChange, reason: str) -> None:
        """Record that a change could not be undone."""
        name, failed = change.setting, ApplyOutcome.FAILED
        made = self.reports.get(name) or SettingReport(
            setting=name, outcome=failed, wanted=change.before, actual="-"
        )
        self.reports[name] = replace(made, outcome=failed, detail=reason)

    def names(self, *outcomes: ApplyOutcome) -> set[str]:
        """Return the settings with one of these outcomes."""
        return {name for name, report in self.reports.items() if report.outcome in outcomes}

    def report(
        self, record: Record, state: ProfileState, detail: str = "", *, undone: bool = False
    ) -> Report:
        """Return the report of the run so far."""
        report = Report(
            name=self._target.name,
            generation=self._target.generation,
            epoch=self._target.epoch,
            state=state,
            detail=detail,
            settings=list(self.reports.values()),
            took_ms=round((self._host.monotonic() - self._began) * 1000, 3),
            at=self._host.now(),
            effective=record.applied.name if record.applied else "",
            command=self._command,
            boot_id=self._host.hardware.boot_id,
            uptime_s=self._host.monotonic(),
            rolled_back=undone,
        )
        return replace(report, switched=self._switched(report))

    def _switched(self, report: Report) -> Switched | None:
        """Return the times of this run; before its first write, those of an earlier run."""
        if not self.written or report.state is ProfileState.APPLYING:
            last = self._state.read_status()
            return last.switched if last else None
        return switch_of(report, [change.setting for change in self.written])
