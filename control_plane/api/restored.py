"""A store that was restored from a copy: the stored state of that, and its view for operators."""

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
    """Tasks that were commanded in this term or an earlier one predate the restore."""
    released_at: float = 0.0
    """When an operator released the store's commands; 0: not yet."""
    released_by: str = ""


class Difference(StrEnum):
    """How the tasks on machines differ from the copy."""

    UNKNOWN_JOB = "unknown-job"
    """It runs, and the copy has no such job: deployed since, or already deleted there."""
    NOT_PLACED = "not-placed"
    """It runs, and the copy has the job, but not the task there: moved or added since."""
    CHANGED = "changed"
    """It runs where the copy has it, and was changed since."""
    MISSING = "missing"
    """The copy has it there, and it is not: removed, moved or ended since."""


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
    """What operators look at before the restored store is obeyed."""

    restored: Restored | None
    """None: the store was never restored."""
    tasks: list[FoundTask]
    unheard: list[str]
    """Machines without a report yet: their tasks are unknown."""
