"""What an agent says of one task, and of its host."""

from __future__ import annotations

import msgspec

from agent.api import ProfileStatus, TaskStatus
from agent.usage import TaskUsage, Usages


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


class HostDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of a machine said just now."""

    machine: str
    profile: ProfileStatus
    """Each setting as it was wanted and as it was read back."""
    usage: Usages
