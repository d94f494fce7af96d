"""Probe results → healthy or not, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from agent.api import Exit, Health, Probe, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord
from agent.tasks.core.lifecycle import ended_by_host


@dataclass(frozen=True, slots=True)
class Streak:
    """The verdict so far, and how many answers in a row speak for another one."""

    health: Health = Health.UNKNOWN
    good: int = 0
    bad: int = 0


def after_answer(streak: Streak, ok: bool, probe: Probe, *, starting: bool = False) -> Streak:
    """Return the verdict after one more answer.

    `successes` good ones in a row make healthy, `failures` bad ones in a row unhealthy; what
    is in between changes nothing, so one lost packet is no verdict. While a task is `starting`
    bad answers do not speak against it, until it was healthy once.
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
    """What one probe of a task has found out, for one invocation of its unit."""

    invocation_id: str
    probe: str
    """`ready` (the task's own probe), `startup` or `liveness`."""
    health: Health
    reason: str = ""


def after_verdict(task: TaskRecord, verdict: ProbeVerdict, now: LeaseMoment) -> TaskRecord:
    """Return the task after a verdict; one about an earlier start changes nothing.

    A startup or liveness probe that failed for good is an end of the task: it is counted as
    such here, and what still runs of it is stopped by the decision that follows.
    """
    if task.state is not TaskState.RUNNING or task.invocation_id != verdict.invocation_id:
        return task
    change = msgspec.structs.replace
    if verdict.probe == "ready":
        return change(task, health=verdict.health, reason=verdict.reason)
    if verdict.health is Health.UNHEALTHY:
        ended = ended_by_host(task, Exit(result=verdict.probe, at=now.wall), now)
        return change(
            ended, reason=f"its {verdict.probe} probe exceeded its failure limit: {verdict.reason}"
        )
    if verdict.probe == "startup" and verdict.health is Health.HEALTHY:
        return change(task, started_up=task.invocation_id)
    return task
