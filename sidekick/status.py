"""Compares the host with its profile; changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from sidekick.boot import LINE
from sidekick.observe import HostObservation
from sidekick.record import Record, Target, failure_of
from sidekick.report import ApplyOutcome, ProfileState, Report, SettingReport
from sidekick.setting import Host
from sidekick.settings import setting_of
from sidekick.state import StateFolder
from sidekick.targets import render_again
from wire.errors import HostError, TwineError

NEW_SETTING = "the host lacked it when the profile was applied; apply the profile again"


def state_of(reports: Iterable[SettingReport], name: str) -> ProfileState:
    """Return the state of a profile with these outcomes; the worst one decides."""
    outcomes = {report.outcome for report in reports}
    if ApplyOutcome.FAILED in outcomes:
        return ProfileState.DEGRADED
    if ApplyOutcome.DRIFTED in outcomes:
        return ProfileState.DRIFTED
    if ApplyOutcome.PENDING_REBOOT in outcomes:
        return ProfileState.PENDING_REBOOT
    return ProfileState.VERIFIED if name else ProfileState.NONE


def verify(host: Host, state: StateFolder) -> Report:
    """Compare the host with the applied profile, and store the result for the agent."""
    began = host.monotonic()
    record = state.load()
    last = state.read_status()
    report = _compare(host, state, record, last)
    report = replace(report, took_ms=round((host.monotonic() - began) * 1000, 3))
    state.write_status(report)
    return report


def status(host: Host, state: StateFolder) -> Report:
    """Return the last report, corrected by later events; if it is lost, a new one."""
    record, last = state.load(), state.read_status()
    unfinished = state.unfinished()
    if unfinished and state.is_locked():
        return replace(
            last or Report(),
            name=unfinished.began.target.name,
            state=ProfileState.APPLYING,
            detail=unfinished.describe(running=True),
        )
    was_killed = last is not None and last.state is ProfileState.APPLYING
    if unfinished is None and (was_killed or (last is None and record.applied)):
        return _compare(host, state, record, last)
    rebooted = bool(record.boot_id) and record.boot_id != host.hardware.boot_id
    if unfinished or rebooted:
        return _report_of(host, state, record, last.settings if last else [])
    return last or Report()


def refuse(host: Host, state: StateFolder, target: Target, error: TwineError) -> Report:
    """Report a request that cannot be started, in the status file.

    The host stays as it is; the caller holds the lock.
    """
    reason = "; ".join([str(error), *(f"{e.field}: {e.reason}" for e in error.errors)])
    record = replace(state.load(), failure=failure_of(target, reason, rolled_back=False))
    with contextlib.suppress(HostError):
        state.save(record)
    last = state.read_status()
    report = replace(
        _report_of(host, state, record, last.settings if last else []), command="apply"
    )
    state.write_status(report)
    return report


def _compare(host: Host, state: StateFolder, record: Record, last: Report | None) -> Report:
    """Compare the host with what its profile asks for with the present facts."""
    applied = record.applied or Target()
    target, problem = render_again(applied, host)
    applied_names = {wanted.setting for wanted in applied.wanted}
    found = HostObservation(host, record, target).verify()
    reports = [
        replace(report, detail=NEW_SETTING)
        if report.outcome is ApplyOutcome.DRIFTED and report.setting not in {*applied_names, LINE}
        else _with_cause(host, report, last)
        for report in found
    ]
    report = _report_of(host, state, record, reports)
    if problem and report.state is ProfileState.VERIFIED:
        return replace(report, state=ProfileState.DRIFTED, detail=problem)
    return report


def _with_cause(host: Host, report: SettingReport, last: Report | None) -> SettingReport:
    """Return the report of a drifted setting with the time and the program, as far as known.

    A drift that was reported earlier keeps its detail.
    """
    if report.outcome is not ApplyOutcome.DRIFTED or report.detail:
        return report
    earlier = (
        next((s for s in last.settings if s.setting == report.setting), None) if last else None
    )
    if earlier and earlier.outcome is ApplyOutcome.DRIFTED and earlier.actual == report.actual:
        return replace(report, detail=earlier.detail)
    cause = (
        "" if report.setting == LINE else setting_of(report.setting).cause_of_drift(host, report)
    )
    since = f"changed after {date_text(last.at)}" if last and last.at else ""
    return replace(report, detail=", ".join(filter(None, (since, cause))))


def date_text(at: float, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """Return seconds since 1970 as a date in UTC; beyond the calendar as a number of seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return f"{at:g} s since 1970"


def _report_of(
    host: Host, state: StateFolder, record: Record, reports: Sequence[SettingReport]
) -> Report:
    """Return the report on a host on which no sidekick runs."""
    target, last = record.applied or Target(), state.read_status()
    profile_state, detail = state_of(reports, target.name), ""
    unfinished = state.unfinished()
    if unfinished:
        target, profile_state = unfinished.began.target, ProfileState.DEGRADED
        detail = unfinished.describe(running=False)
        detail += "; the next apply-profile, resume or rollback finishes or undoes it"
    elif record.failure:
        profile_state, detail = ProfileState.DEGRADED, record.failure.reason
        failure = record.failure
        target = Target(name=failure.name, generation=failure.generation, epoch=failure.epoch)
    elif record.trial and record.trial.boot_id == host.hardware.boot_id:
        left_s = max(0.0, record.trial.until - host.monotonic())
        detail = f"on trial for {left_s:.0f} s more: `sidekick confirm` keeps it"
    elif record.boot_id and record.boot_id != host.hardware.boot_id:
        detail = "the host was rebooted since, and its profile is not applied again yet"
        if target.name and profile_state in (ProfileState.VERIFIED, ProfileState.PENDING_REBOOT):
            profile_state = ProfileState.DRIFTED
    return Report(
        name=target.name,
        generation=target.generation,
        epoch=target.epoch,
        state=profile_state,
        detail=detail,
        settings=list(reports),
        at=host.now(),
        effective=record.applied.name if record.applied else "",
        command="verify",
        boot_id=host.hardware.boot_id,
        uptime_s=host.monotonic(),
        switched=last.switched if last else None,
    )
