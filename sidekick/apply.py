"""One run: claim, journal, change, read back; on failure undo in reverse.

Order is what makes a crash harmless. The originals are on the disk before the first write,
the journal before each; the record names the new profile only once all of it was read back.
A run that was interrupted is finished by the next one, whatever profile that is for: it
plans from what it finds, and whatever was ever claimed has its original in the record.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from agent.errors import HostError, TwineError, Unprocessable
from sidekick import reboot
from sidekick.plan import Plan, claims
from sidekick.report import Change, Outcome, ProfileState, Report, SettingReport, Wanted
from sidekick.setting import Applied, Host, kind_of
from sidekick.settings import hugepages, kernel
from sidekick.settings.sysctl import TWINS
from sidekick.standing import Look, fresh, state_of
from sidekick.state import (
    Attempt,
    Began,
    Failure,
    Planned,
    Record,
    StateFolder,
    Step,
    Target,
    Undoing,
    Undone,
    Wrote,
)

log = logging.getLogger(__name__)


class _ChangeFailed(HostError):
    """A change was refused or did not read back as wanted."""


@dataclass(slots=True)
class _Run:
    """What one run knows and has done so far."""

    command: str
    target: Target
    look: Look
    before: Record
    """The record to go back to when the run fails."""
    record: Record
    recovers: bool
    """The run before was interrupted: what is found may be half of its profile."""
    began: float
    written: list[Change] = field(default_factory=list)
    results: dict[str, SettingReport] = field(default_factory=dict)


def plan(host: Host, state: StateFolder, target: Target) -> tuple[Plan, list[Wanted]]:
    """Return what `apply` would do now, and all that is wanted."""
    seen = Look(host, fresh(host, state.load()), target)
    return seen.plan, seen.wanted


def apply(
    host: Host,
    state: StateFolder,
    target: Target,
    *,
    may_reboot: bool = False,
    command: str = "apply",
) -> Report:
    """Bring the host to a target, or back to where it was, and report with proof.

    The caller holds the lock. Raises where not even the state can be kept, and
    `Unprocessable` or `ProgramError` where a wanted reboot is refused: the profile is then
    staged all the same.
    """
    record = fresh(host, state.load())
    run = _Run(
        command=command,
        target=target,
        look=Look(host, record, target),
        before=record,
        record=record,
        recovers=state.unfinished() is not None,
        began=host.monotonic(),
    )
    if run.look.plan.missing:
        return _refuse(host, state, run)
    try:
        _claim(host, state, run)
        for change in run.look.plan.changes:
            if kind_of(change.setting) != "kernel":
                _make(host, state, run, change)
        for change in _for_the_boot(state, run):
            _make(host, state, run, change)
        _check(host, run)
    except HostError as e:
        return _undo(host, state, run, str(e))
    report = _commit(host, state, run)
    if may_reboot and report.state is ProfileState.PENDING_REBOOT:
        return _reboot(host, state, run, report)
    return report


def resume(host: Host, state: StateFolder) -> Report:
    """Bring back after a boot what the boot undid, or finish what was interrupted."""
    record, unfinished = state.load(), state.unfinished()
    target = record.applied
    if target is None and (record.owned or record.originals):
        target = Target()
    if unfinished and unfinished.undoing is None:
        target = unfinished.began.target
    if target is None:
        state.end()
        return Report(command="resume", at=host.now(), boot_id=host.hardware.boot_id)
    return apply(host, state, target, command="resume")


def _claim(host: Host, state: StateFolder, run: _Run) -> None:
    """Put the originals, then the journal, on the disk: before the first write."""
    live = {k: v for k, v in run.look.observed.items() if kind_of(k) != "kernel"}
    run.record = replace(run.record, originals=claims(live, run.record.originals))
    changes = run.look.plan.changes
    if not changes:
        return
    state.save(run.record)
    state.begin(
        Began(
            command=run.command,
            target=run.target,
            changes=changes,
            boot_id=host.hardware.boot_id,
            at=host.now(),
        )
    )
    state.write_status(_report(host, run, ProfileState.APPLYING))


def _make(host: Host, state: StateFolder, run: _Run, change: Change) -> None:
    """Write one change and read it back. Raises `_ChangeFailed`."""
    began = host.monotonic()
    run.written.append(change)
    try:
        applied = run.look.setting(change.setting).apply(host, change)
    except TwineError as e:
        applied = Applied(Outcome.FAILED, "-", str(e))
    took_ms = (host.monotonic() - began) * 1000
    fields = {"setting": change.setting, "before": change.before, "after": change.after}
    log.info("setting changed", extra=fields | {"outcome": applied.outcome, "took_ms": took_ms})
    outcome = applied.outcome
    if outcome is Outcome.APPLIED and change.setting not in run.look.names:
        outcome = Outcome.UNDONE
    run.results[change.setting] = SettingReport(
        setting=change.setting,
        outcome=outcome,
        wanted=change.after,
        actual=applied.actual,
        detail=applied.detail,
        took_ms=round(took_ms, 3),
    )
    if outcome is Outcome.FAILED:
        raise _ChangeFailed(f"{change.setting}: {applied.detail}")
    state.step(Wrote(setting=change.setting))


def _for_the_boot(state: StateFolder, run: _Run) -> list[Change]:
    """Return the staging of the command line, now that it is known what it must bring."""
    if any(
        report.outcome is Outcome.PENDING_REBOOT and kind_of(report.setting) == "hugepages"
        for report in run.results.values()
    ):
        run.look.add_argument(hugepages.boot_argument(run.target.wanted))
    observed = run.look.observed
    _, ours = kernel.merge(observed.get(kernel.CMDLINE) or "", run.record.owned, run.look.arguments)
    known = {o.argument for o in ours}
    owned = ours + tuple(o for o in run.record.owned if o.argument not in known)
    run.look.own(owned)
    changes = run.look.setting(kernel.CMDLINE).plan(
        run.look.kernel_wanted, observed, run.record.originals
    )
    if changes:
        staged = {kernel.STAGED: observed.get(kernel.STAGED)}
        run.record = replace(run.record, owned=owned, originals=staged | run.record.originals)
        state.save(run.record)
        if all(kind_of(c.setting) != "kernel" for c in run.look.plan.changes):
            state.step(Planned(changes=tuple(changes)))
    return changes


def _check(host: Host, run: _Run) -> None:
    """Look at everything once more: one write may have changed what another had set."""
    again = Look(host, run.record, run.target)
    waiting = {s for s, r in run.results.items() if r.outcome is Outcome.PENDING_REBOOT}
    for change in again.plan.changes:
        if kind_of(change.setting) != "kernel" and change.setting not in waiting:
            raise _ChangeFailed(
                f"{change.setting} was set to {change.after!r} and reads {change.before!r} again"
            )
    staged = run.results.get(kernel.CMDLINE)
    if staged and run.look.arguments:
        del run.results[kernel.CMDLINE]  # being staged is not how it stands
    for report in again.verify():
        if staged and report.setting == kernel.CMDLINE:
            detail = "; ".join(filter(None, (report.detail, staged.detail)))
            run.results[kernel.CMDLINE] = replace(report, detail=detail, took_ms=staged.took_ms)
        elif report.setting not in run.results:
            already = report.outcome is Outcome.APPLIED
            run.results[report.setting] = (
                replace(report, outcome=Outcome.ALREADY) if already else report
            )
    run.look.observed.update(again.observed)


def _commit(host: Host, state: StateFolder, run: _Run) -> Report:
    """Make the target the applied profile, and judge whether a reboot kept its promise."""
    record = _pruned(run.record, run.target.wanted, run.look)
    pending = any(r.outcome is Outcome.PENDING_REBOOT for r in run.results.values())
    attempt = record.attempt if pending else None
    failure = None
    if attempt and attempt.boot_id != host.hardware.boot_id and attempt.purpose == _purpose(run):
        failure = Failure(
            name=run.target.name,
            generation=run.target.generation,
            epoch=run.target.epoch,
            reason=f"the host was rebooted for it ({attempt.way}) and came back without "
            f"{attempt.purpose}; it is not rebooted again",
            rolled_back=False,
        )
    run.record = replace(
        record,
        applied=run.target if run.target.name else None,
        failure=failure,
        attempt=attempt,
    )
    state.save(run.record)
    standing = state_of(run.results.values(), run.target.name)
    report = _report(
        host,
        run,
        ProfileState.DEGRADED if failure else standing,
        failure.reason if failure else "",
    )
    state.write_status(report)
    state.end()
    return report


def _pruned(record: Record, wanted: Sequence[Wanted], seen: Look) -> Record:
    """Return the record without the originals that are back and arguments that are gone."""
    names = {w.setting for w in wanted}
    names |= {TWINS[name] for name in names if name in TWINS}
    running = (seen.observed.get(kernel.CMDLINE) or "").split()
    owned = tuple(o for o in record.owned if o.argument in seen.arguments or o.argument in running)
    if owned:
        names.add(kernel.STAGED)
    originals = {k: v for k, v in record.originals.items() if k in names}
    return replace(record, owned=owned, originals=originals)


def _purpose(run: _Run) -> str:
    running = run.look.observed.get(kernel.CMDLINE) or ""
    gone = kernel.leftovers(running, run.record.owned, run.look.arguments)
    words = [*run.look.arguments, *(f"-{argument}" for argument in gone)]
    return f"{' '.join(words)} (generation {run.target.generation})"


def _reboot(host: Host, state: StateFolder, run: _Run, report: Report) -> Report:
    """Start the reboot that the staged command line waits for."""
    running = run.look.observed.get(kernel.CMDLINE) or ""
    wanted = run.look.arguments
    line, _ = kernel.merge(running, run.record.owned, wanted)
    gone = kernel.leftovers(running, run.record.owned, wanted)
    try:
        way = reboot.choose(host, reboot.read_config(host), wanted, gone)
        attempt = Attempt(
            boot_id=host.hardware.boot_id, purpose=_purpose(run), way=way.name, at=host.now()
        )
        state.save(replace(run.record, attempt=attempt))
        report = replace(report, detail=f"rebooting by {way.name}")
        state.write_status(report)
        log.info("reboot", extra={"way": way.name, "cmdline": line})
        reboot.carry_out(host, way, line)
    except (Unprocessable, HostError) as e:
        state.write_status(replace(report, detail=str(e)))
        raise
    return report


def _refuse(host: Host, state: StateFolder, run: _Run) -> Report:
    """Report that this kernel cannot run the profile; nothing was written."""
    for wanted in run.look.plan.missing:
        run.results[wanted.setting] = SettingReport(
            setting=wanted.setting,
            outcome=Outcome.FAILED,
            wanted=wanted.value,
            actual="-",
            detail="this kernel lacks it",
        )
    lacking = ", ".join(w.setting for w in run.look.plan.missing)
    report = _failed(host, state, run, f"this kernel lacks {lacking}; nothing was changed")
    if not run.recovers:
        state.end()
    return report


def _undo(host: Host, state: StateFolder, run: _Run, reason: str) -> Report:
    """Take back all that this run wrote, last first."""
    log.warning("profile failed, undoing", extra={"profile": run.target.name, "reason": reason})
    _note(state, Undoing(reason=reason))
    problems = []
    for change in reversed(run.written):
        made = run.results[change.setting]
        try:
            run.look.setting(change.setting).undo(host, change)
            _note(state, Undone(setting=change.setting))
            if made.outcome is not Outcome.FAILED:
                run.results[change.setting] = replace(
                    made, outcome=Outcome.UNDONE, actual=change.before, detail=""
                )
        except TwineError as e:
            problems.append(str(e))
            run.results[change.setting] = replace(made, outcome=Outcome.FAILED, detail=str(e))
    if run.recovers and not problems:
        problems = _go_back(host, run)
    if problems:
        reason = f"{reason}; and not all could be undone: {'; '.join(problems)}"
    report = _failed(host, state, run, reason, undone=not problems)
    if not problems:
        state.end()
    return report


def _go_back(host: Host, run: _Run) -> list[str]:
    """Return to the profile of the record where the run before left half of another one."""
    target = run.before.applied or Target()
    seen = Look(host, run.record, target)
    problems = []
    for change in seen.plan.changes:
        try:
            applied = seen.setting(change.setting).apply(host, change)
        except TwineError as e:
            applied = Applied(Outcome.FAILED, "-", str(e))
        if applied.outcome is Outcome.FAILED:
            problems.append(f"{change.setting}: {applied.detail}")
    if not problems:
        run.before = _pruned(run.record, target.wanted, Look(host, run.record, target))
    return problems


def _failed(
    host: Host, state: StateFolder, run: _Run, reason: str, *, undone: bool = True
) -> Report:
    """Remember and report a failure; the journal stays, for the caller to close."""
    target = run.target
    failure = Failure(
        name=target.name,
        generation=target.generation,
        epoch=target.epoch,
        reason=reason,
        rolled_back=undone,
    )
    run.record = replace(run.before if undone else run.record, failure=failure)
    state.save(run.record)
    report = replace(_report(host, run, ProfileState.DEGRADED, reason), rolled_back=undone)
    state.write_status(report)
    return report


def _report(host: Host, run: _Run, state: ProfileState, detail: str = "") -> Report:
    applied = run.record.applied
    return Report(
        name=run.target.name,
        generation=run.target.generation,
        epoch=run.target.epoch,
        state=state,
        detail=detail,
        settings=list(run.results.values()),
        took_ms=round((host.monotonic() - run.began) * 1000, 3),
        at=host.now(),
        effective=applied.name if applied else "",
        command=run.command,
        boot_id=host.hardware.boot_id,
    )


def _note(state: StateFolder, step: Step) -> None:
    """Note a step while going back, which a full disk must not stop."""
    with contextlib.suppress(TwineError):
        state.step(step)
