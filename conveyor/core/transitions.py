"""Changes of a run's record: log entries, its rollback, the time of blocked steps, and its end."""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.runs import (
    ENDED,
    LOG_MAX,
    LogEntry,
    PipelineRun,
    RunObserved,
    RunState,
    StepTime,
)

SERVICE_NAME = "conveyor"
"""The name of this service in the log of a run."""
LATE_REQUEST_S = 600.0
"""An overloaded front end may carry out a request up to this time after its sender gave up."""
OBSERVED_S = 60.0
"""Interval between two writes of the time at which a run was observed. A soak lasts at most this
much longer after a process on another host has taken over."""
_LOG_FIRST = 10
"""Entries at the beginning of a log, which are never dropped."""


def rolling_back(run: PipelineRun, who: str, reason: str, now: float) -> PipelineRun:
    """Return the run after the begin of its rollback."""
    ended_steps = run.steps
    if ended_steps and ended_steps[-1].ended is None:
        ended_steps = (*ended_steps[:-1], replace(ended_steps[-1], ended=now))
    back = StepTime(name="rollback", began=now)
    run = logged(run, now, who, f"rolls back: {reason}")
    return replace(
        run,
        state=RunState.ROLLING_BACK,
        steps=(*ended_steps, back),
        reason=reason,
        paused=False,
        waits="",
    )


def with_blocked_time(run: PipelineRun, is_blocked: bool, now: float) -> PipelineRun:
    """Return the run with the time for which its step was blocked until now."""
    since, time = run.blocked_since, run.steps[-1]
    if is_blocked and since is None:
        return replace(run, blocked_since=now)
    if is_blocked or since is None:
        return run
    if time.reached is None:
        time = replace(time, blocked_s=time.blocked_s + max(0.0, now - max(since, time.began)))
    return replace(run, blocked_since=None, steps=(*run.steps[:-1], time))


def observed(run: PipelineRun, boot: str, now: float) -> PipelineRun:
    """Return the run as a process observes it now.

    `boot` names the boot of the host of the process; empty: it is not known. The clocks of two
    hosts may differ by minutes. So if another boot observed the run last, the times of its step are
    moved forward by the time since then: the step continues where it was.
    """
    last = run.observed
    if not boot:
        return run
    if last is not None and last.boot == boot:
        if 0 <= now - last.at < OBSERVED_S:
            return run
    elif last is not None and run.steps and run.steps[-1].ended is None:
        unobserved_s, step, since = now - last.at, run.steps[-1], run.blocked_since
        reached = None if step.reached is None else step.reached + unobserved_s
        step = replace(step, began=step.began + unobserved_s, reached=reached)
        since = None if since is None else since + unobserved_s
        run = replace(run, steps=(*run.steps[:-1], step), blocked_since=since)
    return replace(run, observed=RunObserved(boot=boot, at=now))


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
    run = logged(run, now, SERVICE_NAME, f"{state}{': ' if reason else ''}{reason}")
    return replace(run, state=state, reason=reason, ended=now, waits="", ending=None, paused=False)


def check_may_begin(run: PipelineRun, now: float) -> bool:
    """Return whether a check of an ended run may still begin, by a request without an answer."""
    return run.ended is not None and now - run.ended < LATE_REQUEST_S
