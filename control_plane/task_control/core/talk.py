"""What goes to and fro between the scheduler and a job's controller, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taskcontrol.api import AdvanceNotice, TaskOperation, UnhealthyTask


@dataclass(frozen=True, slots=True)
class Question:
    """All that a call says but its number, its time and what has ended since the last one."""

    request: tuple[TaskOperation, ...] = ()
    notices: tuple[AdvanceNotice, ...] = ()
    unhealthy: tuple[UnhealthyTask, ...] = ()
    tasks: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """What a controller answered last."""

    acks: Mapping[str, str] = field(default_factory=dict)
    """Operation → what it may be done as instead; empty: as it was asked."""
    down: frozenset[int] = frozenset()
    """Tasks of which it was told that they do not serve, or may stop serving any moment."""
    broken: frozenset[int] = frozenset()
    """Those of them that did not serve, whatever was acknowledged."""
    by: str = ""
    """Its name and the number of the call."""
