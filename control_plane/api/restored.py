"""A store that was restored from a copy: the stored record, and the view for operators."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agent.api import TaskState


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """Records that the store was restored."""

    schema: int = 1
    at: float
    """When it was restored, in seconds since 1970."""
    copied_at: float
    """When the copy was made; 0: unknown."""
    epoch: int
    """Commands with this or an earlier epoch were sent before the restore."""
    released_at: float = 0.0
    """When an operator released the store's commands; 0: not yet."""
    released_by: str = ""


class Difference(StrEnum):
    """How the tasks on machines differ from the copy."""

    UNKNOWN_JOB = "unknown-job"
    """It runs, but the copy has no such job: deployed later, or deleted before the copy."""
    NOT_PLACED = "not-placed"
    """It runs, but the copy has the task elsewhere or not at all: moved or added later."""
    CHANGED = "changed"
    """It runs where the copy has it, but was changed later."""
    MISSING = "missing"
    """The copy has it there, but it does not run: removed, moved or ended later."""


class FoundTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task for which copy and machine differ."""

    machine: str
    task: str
    job: str
    entitlement: str
    difference: Difference
    state: TaskState | None = None
    generation: int = 0
    since: float | None = None
    """When the running task was started, in seconds since 1970."""


class RestoredView(msgspec.Struct, frozen=True, kw_only=True):
    """The differences that operators review before they release the restored store."""

    restored: Restored | None
    """None: the store was never restored."""
    tasks: list[FoundTask]
    unheard: list[str]
    """Machines without a report so far: their tasks are unknown."""
