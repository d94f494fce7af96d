"""One run: claim, journal, change, read back; on failure undo in reverse.

The order of writes makes a crash harmless. The originals are on the disk before the first write,
and the journal before each write. The record names the new profile only once every value was read
back. The next run finishes an interrupted one, whatever profile it is for: it plans from the values
that it finds, and the record has the original of every claimed setting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby

from msgspec.structs import replace

from sidekick import boot, reboot
from sidekick.boot import LINE
from sidekick.journal import Began, Planned, Step, Undoing, Undone, Wrote
from sidekick.observe import HostObservation, record_for_boot
from sidekick.plan import with_value_before_run
from sidekick.record import Target, Trial, failure_of
from sidekick.report import ApplyOutcome, ProfileState, Report, SettingChange
from sidekick.results import RunResults
from sidekick.setting import Applied, Host
from sidekick.settings import setting_of
from sidekick.state import StateFolder
from sidekick.status import state_of
from sidekick.write_order import call_in_passes, write_all
from wire.errors import HostError, TwineError


class _ChangeFailed(HostError):
    """A change was refused or did not read back as wanted."""

    change: SettingChange | None = None


class ApplyRun:
    """Brings the host to a target, or back to where it was, and reports with proof.

    The caller holds the lock. The constructor observes the host. The only value that it may change
    is `kernel.panic`, after a boot with sidekick's line. `carry_out` is called once.
    """

    def __init__(
        self,
        host: Host,
        state: StateFolder,
        target: Target,
        *,
        command: str = "apply",
        may_reboot: bool = False,
        trial_until: float | None = None,
    ) -> None:
        """At `trial_until` (seconds of the host's monotonic clock) the target is reverted.

        Raises `Unprocessable` where the target asks for more than the host has.
        """
        self._host = host
        self._state = state
        self._target = target
        self._command = command
        self._may_reboot = may_reboot
        self._trial_until = trial_until
        self._results = RunResults(host, state, target, command)
        loaded = state.load()
        if loaded.boot_id != host.hardware.boot_id:
            boot.disarm_panic_guard(host, loaded.boot)
        self._before = record_for_boot(host, loaded)
        """The record to go back to when the run fails."""
        self._record = self._before
        self._number = loaded.finished + 1
        self._interrupted = state.unfinished()
        """The previous run, if it was interrupted: the host may have half of its profile."""
        self.observation = HostObservation(host, self._record, target)
        """The last observation before the writes, with its plan."""
        self._observed_first = self._observed_last = self.observation

    def carry_out(self) -> Report:
        """Make all changes, or none.

        Raises `HostError` if the state cannot be stored, and `Unprocessable` if the plan needs a
        disruption that is not allowed now; nothing is changed then. Raises `Unprocessable` or
        `ProgramError` if a wanted reboot is refused; the profile stays staged for the next boot.
        """
        if self.observation.plan.missing and not self.observation.changes_adding_settings:
            return self._refuse()
        self.check_allowed()
        try:
            self._claim()
            if self.observation.changes_adding_settings:
                self._add_missing_settings()
            self._write(self.observation.plan.changes)
            for change in self._plan_boot_line():
                self._make_change(change)
            self._restart_services(self._results.written, self._interrupted_changes())
            self._verify_all()
        except HostError as e:
            return self._roll_back(str(e))
        try:
            report = self._commit()
        except HostError as e:
            if not self._target.name:
                raise  # all originals are restored: there is nothing to undo
            return self._roll_back(str(e))
        if not self._may_reboot or report.state is not ProfileState.PENDING_REBOOT:
            return report
        return reboot.begin(
            self._host, self._state, self._record, self.observation, self._boot_purpose(), report
        )

    def check_allowed(self) -> None:
        """Raise `Unprocessable` if tasks or the trial forbid the disruption of the plan."""
        self.observation.check_allowed(is_trial=self._trial_until is not None)

    def _claim(self) -> None:
        """Store the originals, then the journal, before the first write."""
        observation = self.observation
        self._record = replace(observation.claim(self._record), trial=self._new_trial())
        if not observation.plan.changes and self._trial_until is None:
            return
        began = Began(
            command=self._command,
            target=self._target,
            changes=(*observation.plan.changes, *self._interrupted_changes()),
            boot_id=self._host.hardware.boot_id,
            at=self._host.now(),
            number=self._number,
        )
        if self._target.name:
            self._state.reserve()
        self._persist(lambda: self._state.save(self._record))
        self._persist(lambda: self._state.begin(began))
        self._state.write_status(self._results.report(self._record, ProfileState.APPLYING))

    def _persist(self, write: Callable[[], None]) -> None:
        """Write a record that a later run needs.

        A revert continues if the write fails: all original values are in the record already.
        """
        try:
            write()
        except HostError:
            if self._target.name:
                raise

    def _new_trial(self) -> Trial | None:
        if self._trial_until is None:
            return self._before.trial
        trial, applied = self._before.trial, self._before.applied
        return Trial(
            back=trial.back if trial else applied or Target(),
            boot_id=self._host.hardware.boot_id,
            until=self._trial_until,
        )

    def _add_missing_settings(self) -> None:
        """Load modules that may add missing settings, then observe the host again.

        Raises `_ChangeFailed` if settings are still missing.
        """
        planned = {change.setting for change in self.observation.plan.changes}
        self._write(self.observation.changes_adding_settings)
        self.observation = observation = HostObservation(self._host, self._record, self._target)
        if observation.plan.missing:
            raise _ChangeFailed(observation.missing_text)
        self.check_allowed()
        self._record = observation.claim(self._record)
        self._persist(lambda: self._state.save(self._record))
        if more := tuple(c for c in observation.plan.changes if c.setting not in planned):
            self._persist(lambda: self._state.step(Planned(changes=more)))

    def _write(self, changes: Iterable[SettingChange]) -> None:
        """Write changes, those of interdependent kinds in an order that the kernel accepts."""
        live = (change for change in changes if change.setting != LINE)
        for interdependent, group in groupby(live, lambda c: setting_of(c.setting).interdependent):
            remaining, undo = list(group), self.observation.undo if interdependent else None
            while remaining:
                try:
                    write_all(remaining, self._make_change, undo)
                    break
                except _ChangeFailed as e:
                    remaining.remove(self._leave_to_boot(e))

    def _leave_to_boot(self, failed: _ChangeFailed) -> SettingChange:
        """Leave to the next boot an original that the kernel refuses now.

        Raises `failed` if the profile wants the value, or if a boot does not restore it.
        """
        change = failed.change
        if (
            change is None
            or change.setting in self.observation.names
            or not setting_of(change.setting).is_restored_by_boot
        ):
            raise failed
        left = {**self._record.left, change.setting: change.after}
        self._record = replace(self._record, left=left)
        self._results.record_left_to_boot(change)
        return change

    def _make_change(self, change: SettingChange) -> None:
        """Write one change and read it back. Raises `_ChangeFailed`."""
        began = self._host.monotonic()
        self._results.record_attempt(change)
        try:
            applied = self.observation.apply(change)
        except TwineError as e:
            applied = Applied(ApplyOutcome.FAILED, "-", str(e))
        is_line = change.setting == LINE and change.after != ""
        wanted = is_line or change.setting in self.observation.names
        self._results.record_result(change, applied, self._host.monotonic() - began, wanted=wanted)
        if applied.outcome is ApplyOutcome.FAILED:
            failed = _ChangeFailed(f"{change.setting}: {applied.detail}")
            failed.change = change
            raise failed
        self._persist(lambda: self._state.step(Wrote(setting=change.setting)))

    def _plan_boot_line(self) -> list[SettingChange]:
        """Return the change of the boot line, now that the values that need a boot are known.

        Sidekick's arguments are stored in the record before the line is staged.
        """
        changes = self.observation.plan_boot_line(self._results.names(ApplyOutcome.PENDING_REBOOT))
        if changes:
            self._record = replace(self._record, boot=self.observation.wanted.owned)
            self._persist(lambda: self._state.save(self._record))
            if all(change.setting != LINE for change in self.observation.plan.changes):
                self._persist(partial(self._state.step, Planned(changes=tuple(changes))))
        return changes

    def _interrupted_changes(self) -> list[SettingChange]:
        """Return the changes of an interrupted run that still need a restart of services."""
        changes = self._interrupted.began.changes if self._interrupted else ()
        return [change for change in changes if change.restarts]

    def _restart_services(self, *changes: Iterable[SettingChange]) -> None:
        """Restart each service that the changes need restarted, once."""
        units = [u for group in changes for change in group for u in change.restarts]
        for unit in dict.fromkeys(units):
            self._host.processes.run(["systemctl", "try-restart", unit], timeout_s=120.0)

    def _verify_all(self) -> None:
        """Read every value again: a write may have changed a value that was set before it.

        Such a value of an interdependent kind is written again, as long as each round has fewer.
        """
        not_in_force = self._results.names(ApplyOutcome.PENDING_REBOOT, ApplyOutcome.PARTIAL)
        last_count: int | None = None
        while True:
            self._observed_last = again = HostObservation(
                self._host, self._record, self._target, is_written=True
            )
            changed = [c for c in again.plan.changes if c.setting not in {LINE, *not_in_force}]
            if not changed:
                break
            independent = [c for c in changed if not setting_of(c.setting).interdependent]
            if independent or (last_count is not None and len(changed) >= last_count):
                change = (independent or changed)[0]
                raise _ChangeFailed(
                    f"{change.setting} was set to {change.after!r} but reads "
                    f"{change.before!r} again"
                )
            last_count = len(changed)
            self._persist(partial(self._state.step, Planned(changes=tuple(changed))))
            written, found = self._results.written, self._observed_first.observed
            self._write([with_value_before_run(change, written, found) for change in changed])
        for report in again.verify():
            self._results.record_verified(report)

    def _commit(self) -> Report:
        """Make the target the applied profile, and check whether a reboot had its effect."""
        record = self._observed_last.pruned(self._record)
        pending = self._results.names(ApplyOutcome.PENDING_REBOOT)
        attempt = record.attempt if pending else None
        failure = None
        boot_id = self._host.hardware.boot_id
        if attempt and attempt.boot_id != boot_id and attempt.purpose == self._boot_purpose():
            failure = reboot.failed_attempt(self._target, attempt)
        self._record = replace(
            record,
            applied=self._target if self._target.name else None,
            failure=failure,
            attempt=attempt,
            trial=self._record.trial if self._trial_until is not None else None,
            finished=self._number,
        )
        self._state.save(self._record)
        state = state_of(self._results.reports.values(), self._target.name)
        if failure:
            state = ProfileState.DEGRADED
        report = self._results.report(self._record, state, failure.reason if failure else "")
        self._state.write_status(report)
        self._state.end()
        return report

    def _boot_purpose(self) -> str:
        return f"{self.observation.wanted.purpose} (generation {self._target.generation})"

    def _refuse(self) -> Report:
        """Report that this kernel cannot run the profile; nothing was written."""
        missing = self.observation.missing_reports()
        self._results.reports |= {report.setting: report for report in missing}
        report = self._report_failure(f"{self.observation.missing_text}; nothing was changed")
        if not self._interrupted:
            self._state.end()
        return report

    def _roll_back(self, reason: str) -> Report:
        """Undo all that this run wrote, last first."""
        profile = self._target.name
        about = {"profile": profile, "reason": reason}
        self._host.log.warning("profile failed, undoing", extra=about)
        self._record_step(Undoing(reason=reason))
        problems = [str(error) for error in self._undo_writes()]
        try:
            self._restart_services(self._results.written)
        except TwineError as e:
            problems.append(str(e))
        if self._interrupted and not problems:
            problems = self._return_to_applied()
        if problems:
            reason = f"{reason}; some changes could not be undone: {'; '.join(problems)}"
        else:
            self._before = replace(self._before, finished=self._number)
        report = self._report_failure(reason, undone=not problems)
        if not problems:
            self._state.end()
        return report

    def _undo_writes(self) -> list[TwineError]:
        """Undo the written changes and their side effects; return the errors that remain."""
        wrote = list(reversed(self._results.written))
        _, refused = call_in_passes(wrote, self._undo_one)
        dependent = [c for c in wrote if c.setting != LINE and setting_of(c.setting).interdependent]
        again = [*dependent, *self._observed_first.side_effects_of(c.setting for c in wrote)]
        for step in (self.observation.undo, self.observation.check_undone):
            if not refused:
                _, refused = call_in_passes(again, step)
        for change, error in refused:
            self._results.record_undo_failure(change, str(error))
        return [error for _, error in refused]

    def _undo_one(self, change: SettingChange) -> None:
        self.observation.undo(change)
        self._record_step(Undone(setting=change.setting))
        self._results.record_undone(change)

    def _return_to_applied(self) -> list[str]:
        """Apply the recorded profile again after an interrupted run of another one."""
        target = self._before.applied or Target()
        problems = HostObservation(self._host, self._record, target).apply_all()
        if not problems:
            self._before = HostObservation(self._host, self._record, target).pruned(self._record)
        return problems

    def _report_failure(self, reason: str, *, undone: bool = True) -> Report:
        """Record and report a failure. The caller ends the journal."""
        failure = failure_of(self._target, reason, rolled_back=undone)
        self._record = replace(self._before if undone else self._record, failure=failure)
        try:
            self._state.save(self._record)
        except HostError as e:
            if not undone or not self._results.written:
                raise HostError(reason) from e  # the originals and the journal stay as they are
        report = self._results.report(self._record, ProfileState.DEGRADED, reason, undone=undone)
        self._state.write_status(report)
        return report

    def _record_step(self, step: Step) -> None:
        """Record a step of an undo, which a full disk must not stop."""
        with contextlib.suppress(TwineError):
            self._state.step(step)
