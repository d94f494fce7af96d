"""A store that was restored from a copy: what is stored about that, and what operators see."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agent.api import TaskState


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """That the store was restored, as it is stored."""

    schema: int = 1
    at: float
    """When it was restored, in seconds since 1970."""
    copied_at: float
    """When the copy was made; 0: not known."""
    epoch: int
    """Tasks that were told in this term or an earlier one are of before."""
    released_at: float = 0.0
    """When an operator said that what the store wants may be done; 0: not yet."""
    released_by: str = ""


class Difference(StrEnum):
    """How what is found on machines differs from the copy."""

    UNKNOWN_JOB = "unknown-job"
    """It runs, and the copy has no such job: deployed since, or its job was gone in the copy."""
    NOT_PLACED = "not-placed"
    """It runs, and the copy has the job, but not the task there: moved or added since."""
    CHANGED = "changed"
    """It runs where the copy has it, and was changed since."""
    MISSING = "missing"
    """The copy has it there, and it is not: removed, moved or ended since."""


class FoundTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose copy and whose machine do not agree."""

    machine: str
    task: str
    job: str
    entitlement: str
    difference: Difference
    state: TaskState | None = None
    generation: int = 0
    since: float | None = None
    """When what runs was started, in seconds since 1970."""


class RestoredView(msgspec.Struct, frozen=True, kw_only=True):
    """What operators look at before the restored store is obeyed."""

    restored: Restored | None
    """None: the store was never restored."""
    tasks: list[FoundTask]
    unheard: list[str]
    """Machines that were not heard yet: of them nothing is known."""
