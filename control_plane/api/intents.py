"""Intents: what each writer wants of a job, one dimension at a time (docs/intents.md)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from agent.api import Argument, Count, DigestStr, EnvName, Name, Words
from control_plane.api.jobs import JobSpec

REASON_LENGTH = 512
DAY_S = 86_400.0
Part = Annotated[float, Meta(ge=0, le=1)]
"""A part of all tasks. It counts in millionths; half a task is rounded up."""
Number = Annotated[int, Meta(ge=0, le=15_000)]
Reason = Annotated[str, Meta(max_length=REASON_LENGTH)]


class Dimension(StrEnum):
    """What can be wanted of a job independently of all else, the strongest first."""

    HOLD = "hold"
    """Nothing that an intent asks for is begun until then."""
    CANARY = "canary"
    """Some tasks run a variant for a limited time."""
    PUSH = "push"
    """Which specification the tasks run, and on which part of them."""
    SIZE = "size"
    """How many tasks there are."""
    INFRASTRUCTURE = "infrastructure"
    """Which runtime the operators want the next push to start with."""


class IntentWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every write of an intent says besides its content."""

    reason: Reason = ""
    expect: Count | None = None
    """The version that this write replaces; `Conflict` if there is another by now. None: any."""
    take_over: bool = False
    """Write it although somebody else is its writer; the caller is its writer from then on."""


class PushWish(IntentWish, frozen=True, kw_only=True):
    """A specification for a part of the tasks: a push, or the next stage of one."""

    spec: JobSpec | None = None
    """What is pushed; its `tasks` are ignored. None: what is pushed now, with `image` if given."""
    image: DigestStr | None = None
    share: Part = 1.0
    """Of the tasks run it; the rest runs what the job had before the push."""


class SizeWish(IntentWish, frozen=True, kw_only=True):
    """How many tasks there shall be."""

    tasks: Number
    minimum: Number | None = None
    """The job has no fewer, whatever `tasks` says; None: as before, and at first none."""
    maximum: Number | None = None
    """It has no more; None: as before, and at first none."""


class CanaryWish(IntentWish, frozen=True, kw_only=True):
    """A variant that some tasks run for a while, to be compared with the others."""

    tasks: Annotated[int, Meta(ge=1, le=15_000)] = 1
    """So many, …"""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """… or this part of all tasks, if given."""
    image: DigestStr | None = None
    command: Annotated[list[Argument], Meta(max_length=4096)] | None = None
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """Set over the job's; what is not named stays."""
    machine_type: Name | None = None
    """Only tasks on machines of this type, for as long as they are there."""
    lasts_s: Annotated[float, Meta(gt=0, le=30 * DAY_S)]
    """It ends by itself after so many seconds."""


class HoldWish(IntentWish, frozen=True, kw_only=True):
    """Nothing that an intent asks for is begun for a while."""

    lasts_s: Annotated[float, Meta(gt=0, le=90 * DAY_S)]
    """It ends by itself after so many seconds."""


class InfrastructureWish(IntentWish, frozen=True, kw_only=True):
    """The runtime that the next push starts with."""

    runtime: Name


class PushIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A push as it is stored."""

    version: Count
    """Of the job's specification."""
    share: Part = 1.0
    runtime: str = ""
    """Which the push started with; all of it runs this one (JC9)."""


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
    """Of the job's specification, with the changes in it."""
    tasks: Number = 1
    share: float | None = None
    machine_type: str = ""


class InfrastructureIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the operators roll out."""

    runtime: str = ""


class StoredIntent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One dimension of what is wanted of a job, with who wrote it.

    Dimensions that this release does not know are kept and shown as they are (JC16).
    """

    writer: Words = ""
    version: Count = 0
    """Rises with each write of the dimension, also when it is withdrawn."""
    reason: Words = ""
    since: float = 0.0
    """When it was written, in seconds since 1970."""
    expires_at: float | None = None
    """When it is withdrawn by itself; None: never."""
    is_owned: bool = False
    """It was written by its own route: others have to take it over, `job apply` included."""
    value: dict[str, Any] | None = None
    """What is wanted; None: it was withdrawn."""


class IntentView(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension as it is shown."""

    dimension: str
    intent: StoredIntent
    effect: str
    """What it does to the job now."""
    waits_for: str = ""
    """Why it does not, or not yet, do all that it says."""


class TaskCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks are to run a version, how many do, and why."""

    version: int
    wanted: int
    running: int
    why: str


class JobIntents(msgspec.Struct, frozen=True, kw_only=True):
    """All that is wanted of a job, and what comes of it."""

    job: str
    intents: list[IntentView]
    size: int
    """Tasks that there are to be now."""
    versions: list[TaskCount]
