"""Probe results → healthy or not, with hysteresis."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agent.api import Health, Probe


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
