"""Changes of a run's own record: its log, its rollback, the time of blocked steps, and its end."""

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

WHO = "conveyor"
"""The name of this service in the log of a run."""
LATE_S = 600.0
"""How long a request without an answer may still be carried out: a front end may be overloaded."""
OBSERVED_S = 60.0
"""Between two writes of when a run was observed: a soak is at most this much longer after a process
on another host took over."""
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


def observed(run: PipelineRun, boot: str, now: float) -> PipelineRun:
    """Return the run as a process observes it now; `boot`: of its host, empty: not known.

    The clocks of two hosts may differ by minutes. So the step of a run that was observed on another
    boot continues where it was observed last: its times move by what has passed since then.
    """
    last = run.observed
    if not boot:
        return run
    if last is not None and last.boot == boot:
        if 0 <= now - last.at < OBSERVED_S:
            return run
    elif last is not None and run.steps and run.steps[-1].ended is None:
        passed_s, step, since = now - last.at, run.steps[-1], run.blocked_since
        reached = None if step.reached is None else step.reached + passed_s
        step = replace(step, began=step.began + passed_s, reached=reached)
        since = None if since is None else since + passed_s
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
    run = logged(run, now, WHO, f"{state}{': ' if reason else ''}{reason}")
    return replace(run, state=state, reason=reason, ended=now, waits="", ending=None, paused=False)


def may_begin_late(run: PipelineRun, now: float) -> bool:
    """Return whether a check of an ended run may still begin: a request without an answer."""
    return run.ended is not None and now - run.ended < LATE_S
