"""Intents: what each writer wants for one dimension of a job (docs/intents.md)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from agent.api import Count, Words

Part = Annotated[float, Meta(ge=0, le=1)]
"""A part of all tasks. It counts in millionths; half a task is rounded up."""
Number = Annotated[int, Meta(ge=0, le=15_000)]


_MILLION = 1_000_000


def part_of(share: float, size: int) -> int:
    """Return how many of `size` tasks a share is; half a task is rounded up.

    This is the only rounding rule: job control, the scheduler and the conveyor use it. The share
    counts in millionths, so that 0.29 of 50 is 14.5 and not a little less.
    """
    return (2 * round(share * _MILLION) * size + _MILLION) // (2 * _MILLION)


_NO_OVERRIDES = (
    "the tasks of a job are alike and cannot be set one by one (docs/intents.md): for a part of "
    "them use `twinectl job push --share`, for a trial `twinectl job canary --tasks` or "
    "--machine-type, for shards `twinectl job shards`"
)
INSTEAD_OF_TASKS = dict.fromkeys(
    ("overrides", "task_overrides", "task_ids", "task_indexes"), _NO_OVERRIDES
)
"""Fields of a job, a push or a canary that would name single tasks → the message instead."""
INSTEAD_OF_OVERRIDES = {
    **INSTEAD_OF_TASKS,
    "share": "a job file cannot have it: twinectl job push --file FILE --share",
    "canary": "canaries of an update are update.canary; a trial is `twinectl job canary`",
    "hold": "a job file cannot have it: twinectl job hold",
    "size": "the size is `tasks`; of a running job also `twinectl job scale`",
}
"""Keys that a job file cannot have → the command or key to use instead (table 1 of the article:
JC4, FE9)."""


class Dimension(StrEnum):
    """The independent aspects of a job that writers set, in descending order of priority."""

    HOLD = "hold"
    """No change that an intent asks for begins until the hold ends."""
    CANARY = "canary"
    """Some tasks run a variant for a limited time."""
    PUSH = "push"
    """Which specification runs on which part of the tasks."""
    SIZE = "size"
    """The number of tasks."""
    INFRASTRUCTURE = "infrastructure"
    """The runtime with which the next push starts; operators set it."""


class PushIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A push as it is stored."""

    version: Count
    """Version of the job's specification."""
    share: Part = 1.0
    tasks: Number | None = None
    """A fixed number of tasks instead of a share."""

    @property
    def is_whole(self) -> bool:
        """Return whether all tasks are to run the version."""
        return self.tasks is None and self.share >= 1.0

    def of(self, size: int) -> int:
        """Return how many of `size` tasks are to run the version."""
        return part_of(self.share, size) if self.tasks is None else min(self.tasks, size)


class SizeIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A size as it is stored."""

    tasks: Number
    minimum: Number | None = None
    maximum: Number | None = None

    @property
    def wanted(self) -> int:
        """Return the number of tasks within the bounds; the maximum is the stronger one."""
        least = self.tasks if self.minimum is None else max(self.tasks, self.minimum)
        return least if self.maximum is None else min(least, self.maximum)


class CanaryIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A canary as it is stored."""

    version: Count
    """Version of the job's specification that has the canary's changes."""
    tasks: Number = 1
    share: float | None = None
    machine_type: str = ""
    traffic: float | None = None


class InfrastructureIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The runtime that the operators roll out."""

    runtime: str = ""


class HoldIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hold as it is stored; its end is the intent's `expires_at`."""


class StoredIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored intent for one dimension of a job, with its writer.

    Dimensions of other releases are kept and shown unchanged (JC16).
    """

    writer: Words = ""
    version: Count = 0
    """Rises with each write of the dimension, also when it is withdrawn."""
    reason: Words = ""
    since: float = 0.0
    """When it was written, in seconds since 1970."""
    expires_at: float | None = None
    """When it ends automatically, in seconds since 1970; None: never."""
    is_owned: bool = False
    """It was written by its own route: other writers, including `job apply`, must take it over."""
    value: dict[str, Any] | None = None
    """The wanted value; None: it was withdrawn."""
    traffic: float | None = None
    """Of an ended canary: the share of requests that its tasks get until none is left."""
