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


class IntentWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common fields of all writes of an intent."""

    MOVED: ClassVar[dict[str, str]] = INSTEAD_OF_TASKS
    reason: Reason = ""
    expect: Count | None = None
    """The version that this write replaces; `Conflict` if it is no longer current. None: any."""
    take_over: bool = False
    """Write it although another user is its writer; the caller is its writer from then on."""


class PushWish(IntentWish, frozen=True, kw_only=True):
    """A specification for a part of the tasks: a push, or the next stage of one."""

    spec: JobSpec | None = None
    """What is pushed; its `tasks` are ignored. None: what is pushed now, with `image` and
    `configuration` if given."""
    image: DigestStr | None = None
    configuration: Configuration | None = None
    """Instead of the specification's, all files together; None: as it is there."""
    share: Part = 1.0
    """This share of the tasks runs it; the rest runs what the job had before the push."""
    tasks: Number | None = None
    """This number of tasks runs it at every size, instead of a share."""
    gives_back: bool = False
    """The writer does not stay the owner of the dimension: the next writer needs no `take_over`."""


class SizeWish(IntentWish, frozen=True, kw_only=True):
    """The wanted number of tasks."""

    tasks: Number
    minimum: Number | None = None
    """The job has at least this many, whatever `tasks` says; None: as before, at first no bound."""
    maximum: Number | None = None
    """The job has at most this many; None: as before, and at first no bound."""


class SizeWishes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of many jobs in one request, each as if it were sent alone."""

    sizes: Annotated[dict[JobName, SizeWish], Meta(min_length=1, max_length=500)]
    """By job."""


class SizesWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each write."""

    versions: dict[str, int]
    """Job → version of its size intent, which is on disk."""
    refused: dict[str, Problem] = {}
    """Job → why its size was not written."""


class CanaryWish(IntentWish, frozen=True, kw_only=True):
    """A variant that some tasks run for a while, to be compared with the others."""

    tasks: Annotated[int, Meta(ge=1, le=15_000)] = 1
    """Number of tasks that run it …"""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """… or, if given, their share of all tasks."""
    image: DigestStr | None = None
    command: Annotated[list[Argument], Meta(max_length=4096)] | None = None
    environment: Annotated[dict[EnvName, Argument], Meta(max_length=4096)] = {}
    """Set over the job's; other variables stay."""
    configuration: Configuration = {}
    """Files that are put over the job's; other files stay."""
    machine_type: Name | None = None
    """Only tasks on machines of this type, for as long as they are there."""
    traffic: Part | None = None
    """The part of the requests that its tasks get together, by weights of endpoints; None: as much
    as other tasks. The job must have a port."""
    lasts_s: Annotated[float, Meta(gt=0, le=30 * DAY_S)]
    """Seconds after which the canary ends."""


class HoldWish(IntentWish, frozen=True, kw_only=True):
    """Nothing that an intent asks for begins for a while."""

    lasts_s: Annotated[float, Meta(gt=0, le=90 * DAY_S)]
    """Seconds after which the hold ends."""


class InfrastructureWish(IntentWish, frozen=True, kw_only=True):
    """The runtime that the next push starts with."""

    runtime: Name


class IntentView(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension as it is shown."""

    dimension: str
    intent: StoredIntent
    effect: str
    """Its effect on the job now."""
    waits_for: str = ""
    """Why it does not, or not yet, have its whole effect."""


class TaskCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks are to run a version, how many do, and why."""

    version: int
    wanted: int
    running: int
    why: str


class JobIntents(msgspec.Struct, frozen=True, kw_only=True):
    """All that is wanted of a job, and its effect."""

    job: str
    intents: list[IntentView]
    size: int
    """Wanted number of tasks now."""
    versions: list[TaskCount]
