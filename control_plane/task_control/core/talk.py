"""Requests to a job's controller and its answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taskcontrol.api import AdvanceNotice, TaskOperation, UnhealthyTask

_TRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """All that a call says but its number, its time and what has ended since the last one."""

    request: tuple[TaskOperation, ...] = ()
    notices: tuple[AdvanceNotice, ...] = ()
    unhealthy: tuple[UnhealthyTask, ...] = ()
    tasks: int = 0
    indexes: tuple[tuple[int, int], ...] = ()
    """Which tasks those are: the first and the last of each run."""


def soonest_try_s(question: Question, now: float) -> float | None:
    """Return in how long who did not answer is asked again, so that it hears of a deadline yet.

    After a quarter of what is left, so several times before it. None: no deadline is ahead.
    """
    deadlines = [notice.deadline for notice in question.notices]
    deadlines += [operation.deadline for operation in question.request]
    left = [deadline - now for deadline in deadlines if deadline is not None and deadline > now]
    return max(_TRY_S, min(left) / 4) if left else None


@dataclass(frozen=True, slots=True)
class Heard:
    """What a controller answered last."""

    acks: Mapping[str, str] = field(default_factory=dict)
    """Operation → what it may be done as instead; empty: as it was asked."""
    down: frozenset[int] = frozenset()
    """Tasks that it was told do not serve, or may stop serving any moment."""
    broken: frozenset[int] = frozenset()
    """Those of them that did not serve, whatever was acknowledged."""
    by: str = ""
    """Its name and the number of the call."""
