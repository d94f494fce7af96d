"""One task of a job, as it is on its machine."""

from __future__ import annotations

import msgspec

from agent.api import TaskStatus
from agent.usage import TaskUsage


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler knows of a task, and what its agent said just now."""

    task: str
    """Its name: the job and the index."""
    machine: str
    phase: str
    version: int
    reason: str = ""
    status: TaskStatus | None = None
    usage: TaskUsage | None = None
    """None while it has no processes."""
