"""Requests to a job's controller and its answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taskcontrol.api import AdvanceNotice, TaskOperation, UnhealthyTask

_RETRY_MIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """The content of a call, except its number, its time and the operations ended since."""

    request: tuple[TaskOperation, ...] = ()
    notices: tuple[AdvanceNotice, ...] = ()
    unhealthy: tuple[UnhealthyTask, ...] = ()
    tasks: int = 0
    indexes: tuple[tuple[int, int], ...] = ()
    """Indexes of the tasks, as first and last of each range."""


def retry_before_deadline_s(question: Question, now: float) -> float | None:
    """Return the seconds until a silent controller is called again; None: no deadline is ahead.

    It is a quarter of the time left until the next deadline, so that several calls fit before it.
    """
    deadlines = [notice.deadline for notice in question.notices]
    deadlines += [operation.deadline for operation in question.request]
    left = [deadline - now for deadline in deadlines if deadline is not None and deadline > now]
    return max(_RETRY_MIN_S, min(left) / 4) if left else None


@dataclass(frozen=True, slots=True)
class ControllerAnswer:
    """The last answer of a controller."""

    acks: Mapping[str, str] = field(default_factory=dict)
    """Operation → the alternative to do instead; empty: the operation as requested."""
    down: frozenset[int] = frozenset()
    """Tasks that the call reported as not serving, or as about to stop."""
    broken: frozenset[int] = frozenset()
    """Tasks of `down` that did not serve for another reason than an acknowledged operation."""
    by: str = ""
    """The name of the controller and the number of the call."""
