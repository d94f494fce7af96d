"""Changes of a run's own record: its log, its rollback, the time of blocked steps, and its end."""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.runs import ENDED, LOG_MAX, LogEntry, PipelineRun, RunState, StepTime

WHO = "conveyor"
"""The name of this service in the log of a run."""
LATE_S = 600.0
"""How long a request without an answer may still be carried out: a front end may be overloaded."""
_LOG_FIRST = 10
"""Entries at the begin of a log that are never dropped."""


def rolling_back(run: PipelineRun, who: str, reason: str, now: float) -> PipelineRun:
    """Return the run in its rollback."""
    steps_ = run.steps
    if steps_ and steps_[-1].ended is None:
        steps_ = (*steps_[:-1], replace(steps_[-1], ended=now))
    back = StepTime(name="rollback", began=now)
    run = logged(run, now, who, f"rolls back: {reason}")
    return replace(
        run,
        state=RunState.ROLLING_BACK,
        steps=(*steps_, back),
        reason=reason,
        paused=False,
        waits="",
    )


def timed(run: PipelineRun, is_blocked: bool, now: float) -> PipelineRun:
    """Return the run with the time since when its step is blocked."""
    since, time = run.blocked_since, run.steps[-1]
    if is_blocked and since is None:
        return replace(run, blocked_since=now)
    if is_blocked or since is None:
        return run
    if time.reached is None:
        time = replace(time, blocked_s=time.blocked_s + max(0.0, now - max(since, time.began)))
    return replace(run, blocked_since=None, steps=(*run.steps[:-1], time))


def logged(run: PipelineRun, now: float, who: str, what: str) -> PipelineRun:
    """Return the run with one more entry in its log."""
    log = (*run.log, LogEntry(at=now, who=who, what=what, step=run.step))
    if len(log) > LOG_MAX:
        log = (*log[:_LOG_FIRST], *log[_LOG_FIRST + 1 :])
    return replace(run, log=log)


def ended(run: PipelineRun, state: RunState, reason: str, now: float) -> PipelineRun:
    """Return the run at its end."""
    assert state in ENDED
    last = run.steps[-1:]
    if last and last[0].ended is None:
        run = replace(run, steps=(*run.steps[:-1], replace(last[0], ended=now)))
    run = logged(run, now, WHO, f"{state}{': ' if reason else ''}{reason}")
    return replace(run, state=state, reason=reason, ended=now, waits="", ending=None, paused=False)


def may_begin_late(run: PipelineRun, now: float) -> bool:
    """Return whether a check of an ended run may still begin: a request without an answer."""
    return run.ended is not None and now - run.ended < LATE_S
