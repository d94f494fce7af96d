"""What a caller writes to change one dimension of a job, and what is shown."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from agent.api import Argument, Configuration, Count, DigestStr, EnvName, Name
from control_plane.api.intents import INSTEAD_OF_TASKS, Number, Part, StoredIntent
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import JobName
from control_plane.api.updates import DAY_S
from wire.errors import Problem

REASON_MAX = 512
Reason = Annotated[str, Meta(max_length=REASON_MAX)]


class IntentChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common fields of all writes of an intent."""

    MOVED: ClassVar[dict[str, str]] = INSTEAD_OF_TASKS
    reason: Reason = ""
    expect: Count | None = None
    """The version that this write replaces; `Conflict` if it is no longer current. None: any."""
    take_over: bool = False
    """Write it even if another user is its writer; the caller becomes its writer."""


class PushChange(IntentChange, frozen=True, kw_only=True):
    """A specification for a part of the tasks: a push, or the next stage of one."""

    spec: JobSpec | None = None
    """What is pushed; its `tasks` are ignored. None: what is pushed now, with `image` and
    `configuration` if given."""
    image: DigestStr | None = None
    configuration: Configuration | None = None
    """All files, in place of those of the specification; None: unchanged."""
    share: Part = 1.0
    """This share of the tasks runs it; the rest runs what the job had before the push."""
    tasks: Number | None = None
    """This number of tasks runs it at every size, instead of a share."""
    gives_back: bool = False
    """The writer gives up the ownership of the dimension: the next writer needs no `take_over`."""


class SizeChange(IntentChange, frozen=True, kw_only=True):
    """The wanted number of tasks."""

    tasks: Number
    minimum: Number | None = None
    """The job has at least this many, whatever `tasks` says; None: as before, at first no bound."""
    maximum: Number | None = None
    """The job has at most this many; None: as before, and at first no bound."""


class SizeChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of many jobs in one request, each as if it were sent alone."""

    sizes: Annotated[dict[JobName, SizeChange], Meta(min_length=1, max_length=500)]
    """By job."""


class SizesWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each write."""

    versions: dict[str, int]
    """Job → version of its size intent, which is on disk."""
    refused: dict[str, Problem] = {}
    """Job → why its size was not written."""


class CanaryChange(IntentChange, frozen=True, kw_only=True):
    """A variant that some tasks run for a while, to be compared with the others."""

    tasks: Annotated[int, Meta(ge=1, le=15_000)] = 1
    """Number of tasks that run it …"""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """… or, if given, their share of all tasks."""
    image: DigestStr | None = None
    command: Annotated[list[Argument], Meta(max_length=4096)] | None = None
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """Variables that replace those of the job; its other variables stay."""
    configuration: Configuration = {}
    """Files that replace those of the job; its other files stay."""
    machine_type: Name | None = None
    """Only tasks on machines of this type run it."""
    traffic: Part | None = None
    """The share of the requests that its tasks get together, by weights of endpoints; None: as many
    per task as other tasks. The job must have a port."""
    lasts_s: Annotated[float, Meta(gt=0, le=30 * DAY_S)]
    """Seconds after which the canary ends."""


class HoldChange(IntentChange, frozen=True, kw_only=True):
    """A request to begin no change that an intent asks for, for a limited time."""

    lasts_s: Annotated[float, Meta(gt=0, le=90 * DAY_S)]
    """Seconds after which the hold ends."""


class InfrastructureChange(IntentChange, frozen=True, kw_only=True):
    """The runtime that the next push starts with."""

    runtime: Name


class IntentView(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension as it is shown."""

    dimension: str
    intent: StoredIntent
    effect: str
    """Its effect on the job now."""
    waits_for: str = ""
    """Why it does not have its full effect now."""


class TaskCount(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted and the present number of tasks of a version, and the reason."""

    version: int
    wanted: int
    running: int
    why: str


class JobIntents(msgspec.Struct, frozen=True, kw_only=True):
    """All intents of a job, and their effect."""

    job: str
    intents: list[IntentView]
    size: int
    """Wanted number of tasks now."""
    versions: list[TaskCount]
