"""Runs without an operator: after a boot, by the timer, and at the end of a trial.

A run that changed the facts of its own profile is also repeated here.
"""

from __future__ import annotations

from msgspec.structs import replace

from sidekick.apply import ApplyRun
from sidekick.record import Target, Trial
from sidekick.report import ApplyOutcome, ProfileState, Report
from sidekick.setting import Host
from sidekick.state import StateFolder
from sidekick.status import verify
from sidekick.targets import render_again

MAX_ROUNDS = 3
"""A setting can change the facts of a second one, and that one the facts of a third."""


def resume(host: Host, state: StateFolder) -> Report:
    """Apply the profile again after a boot, or finish an interrupted run."""
    record, unfinished = state.load(), state.unfinished()
    target = record.applied
    if target is None and (record.boot or record.originals):
        target = Target()
    if unfinished and unfinished.undoing is None:
        target = unfinished.began.target
    if record.trial and is_over(record.trial, host):
        target = record.trial.back
    elif record.trial:  # a trial stays a trial
        run = ApplyRun(
            host, state, target or Target(), command="resume", trial_until=record.trial.until
        )
        return run.carry_out()
    if target is None:
        state.end()
        return Report(command="resume", at=host.now(), boot_id=host.hardware.boot_id)
    target, _ = render_again(target, host)
    return reapply_while_facts_change(
        host, state, ApplyRun(host, state, target, command="resume").carry_out()
    )


def verify_by_timer(host: Host, state: StateFolder, *, repair: bool) -> Report:
    """Compare the host with its profile for the timer; `repair` restores drifted values.

    A trial whose own timer was lost ends here, too.
    """
    trial = state.load().trial
    if trial and is_over(trial, host):
        return ApplyRun(host, state, trial.back, command="revert").carry_out()
    report = verify(host, state)
    record = state.load()
    drifted = report.state is ProfileState.DRIFTED and state.unfinished() is None
    if repair and drifted and record.applied and not record.trial:
        target, _ = render_again(record.applied, host)
        repaired = reapply_while_facts_change(
            host, state, ApplyRun(host, state, target, command="repair").carry_out()
        )
        found = [
            f"{s.setting} {s.detail}" for s in report.settings if s.outcome is ApplyOutcome.DRIFTED
        ]
        repaired = replace(repaired, detail=repaired.detail or f"repaired: {'; '.join(found)}")
        state.write_status(repaired)
        return repaired
    return report


def reapply_while_facts_change(host: Host, state: StateFolder, report: Report) -> Report:
    """Apply a profile again while applying it changes what it asks for.

    With SMT off there are fewer processors, so `= cpu.count * 2` has another value. `report` is the
    report of the previous run.
    """
    for _ in range(MAX_ROUNDS):
        record = state.load()
        if report.state is not ProfileState.VERIFIED or record.applied is None:
            return report
        target, _ = render_again(record.applied, host)
        if target.wanted == record.applied.wanted:
            return report
        report = ApplyRun(host, state, target, command=report.command).carry_out()
    return report


def is_over(trial: Trial, host: Host) -> bool:
    """Return whether a trial ended without a confirmation, by time or by a boot."""
    return trial.boot_id != host.hardware.boot_id or host.monotonic() >= trial.until
