"""Operations on tasks: kind, cause and progress, and the events that are kept afterwards."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Exit, Name


class OperationKind(StrEnum):
    """The kind of an operation."""

    START = "start"
    RESTART = "restart"
    """Stop it and start it again on its present machine."""
    UPDATE = "update"
    """Restart it with the newest version."""
    MOVE = "move"
    REMOVE = "remove"
    ROLLOUT = "rollout"
    """Concerns the whole job: the progress of its newest version."""


class Cause(StrEnum):
    """Why an operation is done."""

    RESIZE = "resize"
    RELEASE = "release"
    CANARY = "canary"
    """A release that at first only a few tasks get."""
    ROLLBACK = "rollback"
    """Back from a version that failed, or is no longer wanted."""
    SURGE = "surge"
    """It runs in addition to the wanted tasks while others are taken down."""
    STOP = "stop"
    """The job is stopped."""
    FAILURE = "failure"
    """The task failed, or its machine did."""
    GONE = "gone"
    """Its machine no longer belongs to the entitlement."""
    MAINTENANCE = "maintenance"
    LOAN = "loan"
    """Its machine was lent and is called back."""
    PROFILE = "profile"
    """Its machine gets another host profile, which is impossible while tasks run."""
    POWER = "power"
    """The power of its machine is capped."""
    TRANSFER = "transfer"
    """The job moves to another entitlement."""
    OWNER = "owner"
    """The job's owner requested a move or a restart."""
    REBALANCE = "rebalance"
    """The job is spread more evenly afterwards."""


class OperationState(StrEnum):
    """How far an operation is."""

    PROPOSED = "proposed"
    """Planned; it waits for a place, an image or the availability budget."""
    OFFERED = "offered"
    """Ready; it waits for the approval of the TaskController."""
    ACKNOWLEDGED = "acknowledged"
    """Approved; it begins as soon as the budget allows."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    """It became unnecessary before it ended."""


WAITING = (OperationState.PROPOSED, OperationState.OFFERED, OperationState.ACKNOWLEDGED)
"""States before an operation begins; the task is unchanged."""
MUST_LEAVE = (Cause.MAINTENANCE, Cause.LOAN, Cause.POWER, Cause.PROFILE)
"""Causes for which tasks must leave their machine by a deadline."""
STOP = "stop"
"""Value of `instead`: the task stops, and starts on the same machine after the maintenance."""
DEADLINE = "deadline"
"""Value of `approved`: the deadline passed without an approval."""
REASON_MAX = 160
"""Characters of a stored reason; bounds the size of a chunk of tasks."""


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One operation on one task, stored with the task until it ends."""

    id: str
    """Unique in the job."""
    task: int
    kind: OperationKind
    cause: Cause
    reason: str = ""
    state: OperationState = OperationState.PROPOSED
    deadline: float | None = None
    """When it begins even without approval, in seconds since 1970; None: never."""
    from_machine: str = ""
    to_machine: str = ""
    began: float = 0.0
    """When it was proposed, in seconds since 1970."""
    since: float = 0.0
    """When its state last changed."""
    instead: str = ""
    """What is done instead of its kind; empty: its kind."""
    ran: int = 0
    """The version that the task ran when it was proposed; 0: none."""
    was_down: bool = False
    """The task did not serve when it was acknowledged; the approval ends when it serves again."""
    approved: str = ""
    """What approved it, if it needs approval: `zk 17` (call 17 of the controller zk), or
    `deadline`."""


class MoveRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to move a task."""

    to: Annotated[str, Meta(max_length=256)] = ""
    """The target machine; empty: the best other machine."""
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)]


class JobMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to move a job to another entitlement."""

    entitlement: Name


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to restart a task on its machine."""

    reason: Annotated[str, Meta(max_length=REASON_MAX)] = ""
    now: bool = False
    """Restart at once, without the job's budget and controller; requires a reason."""


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An ended operation in the job's log."""

    seq: int = 0
    """Rises by one with each event of the job."""
    task: int | None
    """None: it concerns the whole job."""
    operation: str
    kind: OperationKind
    cause: Cause
    outcome: OperationState
    """`done`, `failed` or `withdrawn`."""
    reason: str = ""
    from_machine: str = ""
    to_machine: str = ""
    version: int = 0
    """The version that the task ran at the end; 0: none."""
    start: float = 0.0
    end: float = 0.0
    approved: str = ""
    """The controller or rule that approved it, as in `Operation`."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """The stored form of consecutive events."""

    schema: int = 1
    events: list[JobEvent]


class GoneJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Deleted jobs whose logs are kept, the oldest first."""

    schema: int = 1
    names: list[str] = []
    generation: int = 0
    """The highest generation, and …"""
    asked: int = 0
    """… the highest number of a call, of all jobs that are no longer kept."""


class JobEvents(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a job's log."""

    job: str
    events: list[JobEvent]
    """Oldest first."""
    more: bool = False
    """There are more after the last of these."""


class TaskStory(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a job with its present and its ended operations."""

    job: str
    task: int
    phase: str = ""
    """Empty: there is no such task now."""
    machine: str = ""
    reason: str = ""
    restarts: int = 0
    """Number of restarts by its agent in this run."""
    last_exit: Exit | None = None
    """Its last exit; None: it has not exited yet."""
    now: Operation | None = None
    events: list[JobEvent] = []
    """Oldest first."""
