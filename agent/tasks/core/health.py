"""Computes a task's health from the results of its probes, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from agent.api import Exit, Health, Probe, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord
from agent.tasks.core.restarts import after_end


@dataclass(frozen=True, slots=True)
class Streak:
    """The verdict so far, and the number of good or bad answers in a row."""

    health: Health = Health.UNKNOWN
    good: int = 0
    bad: int = 0


def after_answer(streak: Streak, ok: bool, probe: Probe, *, starting: bool = False) -> Streak:
    """Return the verdict after one more answer.

    `successes` good answers in a row make a task healthy, `failures` bad ones unhealthy. Fewer
    change nothing, so one lost packet does not matter. While a task is `starting`, bad answers do
    not count until it was healthy once.
    """
    if not ok and starting and streak.health is Health.UNKNOWN:
        return Streak()
    if ok:
        good = streak.good + 1
        health = Health.HEALTHY if good >= probe.successes else streak.health
        return replace(streak, health=health, good=good, bad=0)
    bad = streak.bad + 1
    health = Health.UNHEALTHY if bad >= probe.failures else streak.health
    return replace(streak, health=health, good=0, bad=bad)


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The verdict of one probe of a task, for one invocation of its unit."""

    invocation_id: str
    probe: str
    """`ready` (the task's own probe), `startup` or `liveness`."""
    health: Health
    reason: str = ""


def after_verdict(task: TaskRecord, verdict: ProbeVerdict, now: LeaseMoment) -> TaskRecord:
    """Return the task after a verdict. A verdict on an earlier run changes nothing.

    A startup or liveness probe that exceeded its failure limit counts as an end of the task. The
    next decision stops the processes that still run.
    """
    if task.state is not TaskState.RUNNING or task.invocation_id != verdict.invocation_id:
        return task
    change = msgspec.structs.replace
    if verdict.probe == "ready":
        return change(task, health=verdict.health, reason=verdict.reason)
    if verdict.health is Health.UNHEALTHY:
        ended = after_end(task, Exit(result=verdict.probe, at=now.wall), now)
        return change(
            ended, reason=f"its {verdict.probe} probe exceeded its failure limit: {verdict.reason}"
        )
    if verdict.probe == "startup" and verdict.health is Health.HEALTHY:
        return change(task, started_up=task.invocation_id)
    return task
