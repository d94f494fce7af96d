"""One run: claim, journal, change, read back; on failure undo in reverse.

Order is what makes a crash harmless. The originals are on the disk before the first write,
the journal before each; the record names the new profile only once all of it was read back.
A run that was interrupted is finished by the next one, whatever profile that is for: it
plans from what it finds, and whatever was ever claimed has its original in the record.
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
from sidekick.observe import LEFT_TO_BOOT, Sight, fresh, tasks_of
from sidekick.plan import claims, since_start
from sidekick.record import Failure, Target, Trial
from sidekick.report import (
    ApplyOutcome,
    Disruption,
    ProfileState,
    Report,
    SettingChange,
    SettingReport,
    Switched,
    switch_of,
)
from sidekick.setting import Applied, Host
from sidekick.settings import setting_of
from sidekick.settle import in_passes, write_all
from sidekick.state import StateFolder
from sidekick.status import state_of
from wire.errors import HostError, TwineError, Unprocessable


class _ChangeFailed(HostError):
    """A change was refused or did not read back as wanted."""

    change: SettingChange | None = None


class ApplyRun:
    """Brings the host to a target, or back to where it was, and reports with proof.

    The caller holds the lock. The constructor observes the host and changes nothing; `carry_out`
    is called once.
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
        """With `trial_until` (by the host's monotonic clock) the target is reverted then.

        Raises `Unprocessable` where the target asks more than the host can give.
        """
        self._host = host
        self._state = state
        self._target = target
        self._command = command
        self._may_reboot = may_reboot
        self._trial_until = trial_until
        self._began = host.monotonic()
        loaded = state.load()
        if loaded.boot_id != host.hardware.boot_id:
            boot.disarm(host, loaded.boot)
        self._before = fresh(host, loaded)
        """The record to go back to when the run fails."""
        self._record = self._before
        self._interrupted = state.unfinished()
        """The run before, if it was cut off: what is found may be half of its profile."""
        self._sight = Sight(host, self._record, target)
        self._first = self._after = self._sight
        self._written: list[SettingChange] = []
        self._results: dict[str, SettingReport] = {}

    @property
    def sight(self) -> Sight:
        """What was wanted and found when the run was made, and what it will do."""
        return self._sight

    def carry_out(self) -> Report:
        """Do all of it, or nothing.

        Raises where not even the state can be kept, `Unprocessable` where the plan costs more
        than may be done now (nothing is changed then), and `Unprocessable` or `ProgramError`
        where a wanted reboot is refused: the profile is then staged all the same.
        """
        if self._sight.plan.missing and not self._sight.brings_more:
            return self._refuse()
        self.heed_others()
        try:
            self._claim()
            if self._sight.brings_more:
                self._bring_more()
            self._write(self._sight.plan.changes)
            for change in self._staging():
                self._make(change)
            self._restart(self._written, self._interrupted_changes())
            self._check()
        except HostError as e:
            return self._undo(str(e))
        try:
            report = self._commit()
        except HostError as e:
            if not self._target.name:
                raise  # every original is back: it stays so
            return self._undo(str(e))
        if self._may_reboot and report.state is ProfileState.PENDING_REBOOT:
            return self._reboot(report)
        return report

    # forward

    def heed_others(self) -> None:
        """Raise `Unprocessable` where tasks or a trial forbid what the plan costs."""
        plan = self._sight.plan
        draining = plan.changes_that_drain()
        tasks = tasks_of(self._host) if draining else []
        if tasks:
            raise Unprocessable(
                f"{', '.join(c.setting for c in draining)} cannot be changed while tasks run "
                f"({', '.join(tasks[:3])}{', …' if tasks[3:] else ''}); nothing was changed",
                hint="drain the machine first",
            )
        if self._trial_until is not None and plan.needs.rank >= Disruption.KEXEC.rank:
            raise Unprocessable(
                "a setting that needs a boot cannot be tried: the boot ends the trial; "
                "nothing was changed"
            )

    def _claim(self) -> None:
        """Put the originals, then the journal, on the disk: before the first write."""
        sight = self._sight
        originals = claims(sight.claimed, sight.observed, self._record.originals)
        self._record = replace(self._record, originals=originals, trial=self._trial())
        if not sight.plan.changes and self._trial_until is None:
            return
        began = Began(
            command=self._command,
            target=self._target,
            changes=(*sight.plan.changes, *self._interrupted_changes()),
            boot_id=self._host.hardware.boot_id,
            at=self._host.now(),
        )
        if self._target.name:
            self._state.reserve()
        self._keep(lambda: self._state.save(self._record))
        self._keep(lambda: self._state.begin(began))
        self._state.write_status(self._report(ProfileState.APPLYING))

    def _keep(self, write: Callable[[], None]) -> None:
        """Write a record that a later run needs.

        A revert continues if the write fails: all original values are in the record already.
        """
        try:
            write()
        except HostError:
            if self._target.name:
                raise

    def _trial(self) -> Trial | None:
        if self._trial_until is None:
            return self._before.trial
        trial, applied = self._before.trial, self._before.applied
        return Trial(
            back=trial.back if trial else applied or Target(),
            boot_id=self._host.hardware.boot_id,
            until=self._trial_until,
        )

    def _bring_more(self) -> None:
        """Load the modules, then observe the host again. Raises `_ChangeFailed`."""
        planned = {change.setting for change in self._sight.plan.changes}
        self._write(self._sight.brings_more)
        self._sight = sight = Sight(self._host, self._record, self._target)
        if sight.plan.missing:
            raise _ChangeFailed(sight.lacks)
        self.heed_others()
        originals = claims(sight.claimed, sight.observed, self._record.originals)
        self._record = replace(self._record, originals=originals)
        self._keep(lambda: self._state.save(self._record))
        if more := tuple(c for c in sight.plan.changes if c.setting not in planned):
            self._keep(lambda: self._state.step(Planned(changes=more)))

    def _write(self, changes: Iterable[SettingChange]) -> None:
        """Write changes, those of interdependent kinds in an order that the kernel accepts."""
        live = (change for change in changes if change.setting != LINE)
        for depends, group in groupby(live, lambda c: setting_of(c.setting).interdependent):
            left = list(group)
            while left:
                try:
                    write_all(left, self._make, self._sight.undo if depends else None)
                    break
                except _ChangeFailed as e:
                    left.remove(self._leave_to_boot(e))

    def _leave_to_boot(self, failed: _ChangeFailed) -> SettingChange:
        """Leave an original that the kernel does not take back to the next boot.

        Raises `failed` where the profile wants the value, or a boot would not bring it.
        """
        change = failed.change
        if (
            change is None
            or change.setting in self._sight.names
            or not setting_of(change.setting).is_restored_by_boot
        ):
            raise failed
        left = {**self._record.left, change.setting: change.after}
        self._record = replace(self._record, left=left)
        self._written = [c for c in self._written if c.setting != change.setting]
        made = self._results[change.setting]
        outcome, detail = ApplyOutcome.PENDING_REBOOT, f"{made.detail}; {LEFT_TO_BOOT}"
        self._results[change.setting] = replace(made, outcome=outcome, detail=detail)
        return change

    def _make(self, change: SettingChange) -> None:
        """Write one change and read it back. Raises `_ChangeFailed`."""
        began = self._host.monotonic()
        self._written = [c for c in self._written if c.setting != change.setting] + [change]
        try:
            applied = self._sight.apply(change)
        except TwineError as e:
            applied = Applied(ApplyOutcome.FAILED, "-", str(e))
        took_ms = (self._host.monotonic() - began) * 1000
        outcome = applied.outcome
        fields = {"setting": change.setting, "before": change.before, "after": change.after}
        more = {"outcome": outcome, "took_ms": took_ms}
        self._host.log.info("setting changed", extra=fields | more)
        wanted = change.setting in self._sight.names or (change.setting == LINE and change.after)
        if outcome is ApplyOutcome.APPLIED and not wanted:
            outcome = ApplyOutcome.UNDONE
        self._results[change.setting] = SettingReport(
            setting=change.setting,
            outcome=outcome,
            wanted=change.after,
            actual=applied.actual,
            detail=applied.detail,
            took_ms=round(took_ms, 3),
        )
        if outcome is ApplyOutcome.FAILED:
            failed = _ChangeFailed(f"{change.setting}: {applied.detail}")
            failed.change = change
            raise failed
        self._keep(lambda: self._state.step(Wrote(setting=change.setting)))

    def _staging(self) -> list[SettingChange]:
        """Return the staging of the boot line, now that it is known what it must bring.

        What will be ours on it is on the disk before it is staged.
        """
        waiting = [s for s, r in self._results.items() if r.outcome is ApplyOutcome.PENDING_REBOOT]
        changes = self._sight.fell_short(waiting)
        if changes:
            self._record = replace(self._record, boot=self._sight.wish.owned)
            self._keep(lambda: self._state.save(self._record))
            if all(change.setting != LINE for change in self._sight.plan.changes):
                self._keep(partial(self._state.step, Planned(changes=tuple(changes))))
        return changes

    def _interrupted_changes(self) -> list[SettingChange]:
        """Return those changes of an interrupted run whose services may not be restarted yet."""
        changes = self._interrupted.began.changes if self._interrupted else ()
        return [change for change in changes if change.restarts]

    def _restart(self, *changes: Iterable[SettingChange]) -> None:
        """Restart the services that the changes wait for, each once."""
        units = [u for group in changes for change in group for u in change.restarts]
        for unit in dict.fromkeys(units):
            self._host.processes.run(["systemctl", "try-restart", unit], timeout_s=120.0)

    def _check(self) -> None:
        """Read every value again: one write may have changed what another had set.

        Such a value is written again, as long as each round changes fewer values.
        """
        settled = (ApplyOutcome.PENDING_REBOOT, ApplyOutcome.PARTIAL)
        waiting = {s for s, r in self._results.items() if r.outcome in settled}
        before: int | None = None
        while True:
            self._after = again = Sight(self._host, self._record, self._target, is_written=True)
            waits = {LINE, *waiting}
            changed = [c for c in again.plan.changes if c.setting not in waits]
            if not changed:
                break
            lasting = [c for c in changed if not setting_of(c.setting).interdependent]
            if lasting or (before is not None and len(changed) >= before):
                change = (lasting or changed)[0]
                raise _ChangeFailed(
                    f"{change.setting} was set to {change.after!r} but reads "
                    f"{change.before!r} again"
                )
            before = len(changed)
            self._keep(partial(self._state.step, Planned(changes=tuple(changed))))
            found = self._first.observed
            self._write([since_start(change, self._written, found) for change in changed])
        for report in again.verify():
            if report.setting not in self._results or report.setting == LINE:
                already = report.outcome is ApplyOutcome.APPLIED
                self._results[report.setting] = (
                    replace(report, outcome=ApplyOutcome.ALREADY) if already else report
                )

    def _commit(self) -> Report:
        """Make the target the applied profile, and judge whether a reboot kept its promise."""
        record = self._after.pruned(self._record)
        pending = any(r.outcome is ApplyOutcome.PENDING_REBOOT for r in self._results.values())
        attempt = record.attempt if pending else None
        failure = None
        boot_id = self._host.hardware.boot_id
        if attempt and attempt.boot_id != boot_id and attempt.purpose == self._purpose():
            failure = reboot.came_back_without(self._target, attempt)
        self._record = replace(
            record,
            applied=self._target if self._target.name else None,
            failure=failure,
            attempt=attempt,
            trial=self._record.trial if self._trial_until is not None else None,
        )
        self._state.save(self._record)
        standing = state_of(self._results.values(), self._target.name)
        report = self._report(
            ProfileState.DEGRADED if failure else standing, failure.reason if failure else ""
        )
        self._state.write_status(report)
        self._state.end()
        return report

    def _purpose(self) -> str:
        return f"{self._sight.wish.purpose} (generation {self._target.generation})"

    def _reboot(self, report: Report) -> Report:
        """Start the reboot that the staged command line waits for."""
        host, sight = self._host, self._sight
        try:
            tasks = tasks_of(host)
            if tasks:
                raise Unprocessable(
                    f"no reboot while tasks run ({', '.join(tasks[:3])})",
                    hint="drain the machine first; the profile stays staged",
                )
            way, attempt = reboot.plan(host, self._record, sight.boot, sight.wish, self._purpose())
            reboots = reboot.noted(host, self._record.reboots)
            self._record = replace(self._record, attempt=attempt, reboots=reboots)
            self._state.save(self._record)
            report = replace(report, detail=f"rebooting by {way.name}")
            self._state.write_status(report)
            host.log.info("reboot", extra={"way": way.name, "purpose": attempt.purpose})
            reboot.carry_out(host, way, sight.boot, sight.wish)
        except (Unprocessable, HostError) as e:
            self._state.write_status(replace(report, detail=str(e)))
            raise
        return report

    # backward

    def _refuse(self) -> Report:
        """Report that this kernel cannot run the profile; nothing was written."""
        self._results |= {report.setting: report for report in self._sight.missing_reports()}
        report = self._failed(f"{self._sight.lacks}; nothing was changed")
        if not self._interrupted:
            self._state.end()
        return report

    def _undo(self, reason: str) -> Report:
        """Undo all that this run wrote, last first."""
        profile = self._target.name
        about = {"profile": profile, "reason": reason}
        self._host.log.warning("profile failed, undoing", extra=about)
        self._note(Undoing(reason=reason))
        problems = [str(error) for error in self._take_back()]
        try:
            self._restart(self._written)
        except TwineError as e:
            problems.append(str(e))
        if self._interrupted and not problems:
            problems = self._go_back()
        if problems:
            reason = f"{reason}; some changes could not be undone: {'; '.join(problems)}"
        report = self._failed(reason, undone=not problems)
        if not problems:
            self._state.end()
        return report

    def _take_back(self) -> list[TwineError]:
        """Undo the written changes and what they changed; return what stays refused."""
        wrote = list(reversed(self._written))
        _, refused = in_passes(wrote, self._undo_one)
        dependent = [c for c in wrote if c.setting != LINE and setting_of(c.setting).interdependent]
        again = [*dependent, *self._first.changed_with(c.setting for c in wrote)]
        for step in (self._sight.undo, self._sight.check_undone):
            if not refused:
                _, refused = in_passes(again, step)
        for change, error in refused:
            name, failed = change.setting, ApplyOutcome.FAILED
            made = self._results.get(name) or SettingReport(
                setting=name, outcome=failed, wanted=change.before, actual="-"
            )
            self._results[name] = replace(made, outcome=failed, detail=str(error))
        return [error for _, error in refused]

    def _undo_one(self, change: SettingChange) -> None:
        made = self._results[change.setting]
        self._sight.undo(change)
        self._note(Undone(setting=change.setting))
        if made.outcome is not ApplyOutcome.FAILED:
            made = replace(made, outcome=ApplyOutcome.UNDONE, actual=change.before, detail="")
        self._results[change.setting] = made

    def _go_back(self) -> list[str]:
        """Return to the profile of the record where the run before left half of another one."""
        target = self._before.applied or Target()
        seen = Sight(self._host, self._record, target)
        problems = []
        for change in seen.plan.changes:
            try:
                applied = seen.apply(change)
            except TwineError as e:
                applied = Applied(ApplyOutcome.FAILED, "-", str(e))
            if applied.outcome is ApplyOutcome.FAILED:
                problems.append(f"{change.setting}: {applied.detail}")
        if not problems:
            self._before = Sight(self._host, self._record, target).pruned(self._record)
        return problems

    def _failed(self, reason: str, *, undone: bool = True) -> Report:
        """Remember and report a failure; the journal stays, for the caller to close."""
        failure = Failure(
            name=self._target.name,
            generation=self._target.generation,
            epoch=self._target.epoch,
            reason=reason,
            rolled_back=undone,
        )
        self._record = replace(self._before if undone else self._record, failure=failure)
        try:
            self._state.save(self._record)
        except HostError as e:
            if not undone or not self._written:
                raise HostError(reason) from e  # the originals and the journal stay as they are
        report = self._report(ProfileState.DEGRADED, reason, undone=undone)
        self._state.write_status(report)
        return report

    def _report(self, standing: ProfileState, detail: str = "", *, undone: bool = False) -> Report:
        applied = self._record.applied
        report = Report(
            name=self._target.name,
            generation=self._target.generation,
            epoch=self._target.epoch,
            state=standing,
            detail=detail,
            settings=list(self._results.values()),
            took_ms=round((self._host.monotonic() - self._began) * 1000, 3),
            at=self._host.now(),
            effective=applied.name if applied else "",
            command=self._command,
            boot_id=self._host.hardware.boot_id,
            uptime_s=self._host.monotonic(),
            rolled_back=undone,
        )
        return replace(report, switched=self._switched(report))

    def _switched(self, report: Report) -> Switched | None:
        """Return what this run took; of one that wrote nothing (yet) what an earlier one took."""
        if not self._written or report.state is ProfileState.APPLYING:
            last = self._state.read_status()
            return last.switched if last else None
        return switch_of(report, [change.setting for change in self._written])

    def _note(self, step: Step) -> None:
        """Record a step of an undo, which a full disk must not stop."""
        with contextlib.suppress(TwineError):
            self._state.step(step)
