"""A profile on trial: it is reverted unless it is confirmed in time.

The target to restore and the timer that restores it exist before the first write. After a crash of
sidekick, of its shell, or of the host the trial ends as without a confirmation.
"""

from __future__ import annotations

import contextlib
import math

from msgspec.structs import replace

from sidekick.apply import ApplyRun
from sidekick.record import Target
from sidekick.report import ProfileState, Report
from sidekick.setting import Host
from sidekick.state import StateFolder
from sidekick.status import verify
from sidekick.unattended import is_over
from wire.errors import Conflict, HostError, TwineError
from wire.units import seconds_text

UNIT = "twine-sidekick-revert"


def begin(
    host: Host, state: StateFolder, target: Target, for_s: float, revert: list[str]
) -> Report:
    """Apply a profile for `for_s` seconds; `revert` is the command that a timer runs then.

    Raises what `ApplyRun` raises; the host is then unchanged.
    """
    run = ApplyRun(host, state, target, command="try", trial_until=host.monotonic() + for_s)
    run.check_allowed()
    try:
        _start_timer(host, for_s, revert)
        report = run.carry_out()
    except TwineError:
        _reset_timer(host, state, revert)
        raise
    if report.state is not ProfileState.VERIFIED:
        _reset_timer(host, state, revert)
        return report
    report = replace(
        report, detail=f"on trial for {seconds_text(for_s)}: `sidekick confirm` keeps it"
    )
    state.write_status(report)
    return report


def confirm(host: Host, state: StateFolder) -> Report:
    """Keep the profile that is on trial. Raises `Conflict` if none is, or if the trial is over."""
    record = state.load()
    if record.trial is None or is_over(record.trial, host):
        raise Conflict("no profile is on trial", hint="`sidekick status` shows what is in force")
    if state.unfinished() is not None:
        raise Conflict("the trial was interrupted", hint="`sidekick revert` ends it")
    state.save(replace(record, trial=None))
    _stop_timer(host)
    return replace(verify(host, state), command="confirm")


def revert(host: Host, state: StateFolder, *, due_only: bool = False) -> Report:
    """End a trial now and restore the target before it; without a trial report the host's state."""
    trial = state.load().trial
    if trial is None or (due_only and not is_over(trial, host)):
        return verify(host, state)
    report = ApplyRun(host, state, trial.back, command="revert").carry_out()
    _stop_timer(host)
    return report


def _start_timer(host: Host, for_s: float, revert: list[str]) -> None:
    """Start the timer of a trial in place of the present one."""
    _stop_timer(host)
    after = f"--on-active={math.ceil(for_s)}s"  # systemd reads no exponents
    options = [f"--unit={UNIT}", after, "--timer-property=AccuracySec=1s"]
    host.processes.run(["systemd-run", "--collect", *options, *revert])


def _reset_timer(host: Host, state: StateFolder, revert: list[str]) -> None:
    """Set the timer to the end of the trial in the record; stop it if there is none.

    After a failed `try` that is an earlier trial, or this one if it could not be undone. If this
    fails, the verify timer ends the trial.
    """
    with contextlib.suppress(TwineError):
        trial = state.load().trial
        if trial is None:
            _stop_timer(host)
        else:
            left_s = 1.0 if is_over(trial, host) else trial.until - host.monotonic()
            _start_timer(host, left_s, revert)


def _stop_timer(host: Host) -> None:
    """Stop the timer of a trial; a timer that cannot be stopped has no effect."""
    with contextlib.suppress(HostError):
        host.processes.run(["systemctl", "stop", f"{UNIT}.timer"], check=False)
