"""An agent's report of one task, and of its host."""

from __future__ import annotations

import msgspec

from agent.api import ProfileStatus, TaskStatus
from agent.usage import TaskUsage, Usages


class TaskDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's record of a task, and its agent's present report."""

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
    """The present report of a machine's agent."""

    machine: str
    profile: ProfileStatus
    """Each setting with its wanted and its read value."""
    usage: Usages
