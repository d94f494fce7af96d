"""Operations: what is done to a task, why, and its progress; and what is kept of it afterwards."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Exit, Name


class OperationKind(StrEnum):
    """What is done to a task."""

    START = "start"
    RESTART = "restart"
    """Again on its present machine."""
    UPDATE = "update"
    """It comes back as the newest version."""
    MOVE = "move"
    REMOVE = "remove"
    ROLLOUT = "rollout"
    """Of no single task: the progress of the job's newest version."""


class Cause(StrEnum):
    """Why it is done."""

    RESIZE = "resize"
    RELEASE = "release"
    CANARY = "canary"
    """A release that only a few tasks get at first."""
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
    """Its machine gets another host profile, which cannot be done while tasks run."""
    POWER = "power"
    """The power of its machine is capped."""
    TRANSFER = "transfer"
    """The job moves to another entitlement."""
    OWNER = "owner"
    """Its owner wants it elsewhere, or restarted."""
    REBALANCE = "rebalance"
    """The job is spread more evenly afterwards."""


class OperationState(StrEnum):
    """How far an operation is."""

    PROPOSED = "proposed"
    """Wanted, and waiting: for a place, an image, the availability budget."""
    OFFERED = "offered"
    """Ready, and waiting for the task controller, which may object."""
    ACKNOWLEDGED = "acknowledged"
    """It is approved; it begins as soon as the budget allows."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    """It became unnecessary before it ended."""


WAITING = (OperationState.PROPOSED, OperationState.OFFERED, OperationState.ACKNOWLEDGED)
"""It has not begun: the task is as it was."""
MUST_LEAVE = (Cause.MAINTENANCE, Cause.LOAN, Cause.POWER, Cause.PROFILE)
"""The machine is wanted for something else: tasks leave it by a deadline."""
STOP = "stop"
"""Instead of a move: the task stops, and starts again where it is after the maintenance."""
DEADLINE = "deadline"
"""No controller approved it: its deadline came."""
REASON_MAX = 160
"""Letters of a stored reason, so that a chunk of tasks has a bound."""


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
    """When it begins in any case, in seconds since 1970; None: never."""
    from_machine: str = ""
    to_machine: str = ""
    began: float = 0.0
    """When it was proposed, in seconds since 1970."""
    since: float = 0.0
    """When its state last changed."""
    instead: str = ""
    """What is done in place of its kind; empty: its kind."""
    ran: int = 0
    """The version that the task ran when it was proposed; 0: none."""
    was_down: bool = False
    """The task did not serve when it was acknowledged; the approval ends when it serves again."""
    approved: str = ""
    """What approved it, where it needs approval: `zk 17` (the controller zk, in its call 17), or
    `deadline`."""


class MoveWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task that is to run elsewhere."""

    to: Annotated[str, Meta(max_length=256)] = ""
    """The machine; empty: whichever is best of the others."""
    reason: Annotated[str, Meta(min_length=1, max_length=REASON_MAX)]


class JobMove(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that is to run in another entitlement."""

    entitlement: Name


class RestartWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task that is to restart where it is."""

    reason: Annotated[str, Meta(max_length=REASON_MAX)] = ""
    now: bool = False
    """At once: neither the budget of its job nor its controller is asked. It takes a reason."""


class JobEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation that ended, as the job's log keeps it."""

    seq: int = 0
    """Rises by one with each event of the job."""
    task: int | None
    """None: it is about the job as a whole."""
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
    """Some events in a row, as they are stored."""

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
    """What is known of one task of a job: its present operation, and the ended ones."""

    job: str
    task: int
    phase: str = ""
    """Empty: there is no such task now."""
    machine: str = ""
    reason: str = ""
    restarts: int = 0
    """How often its agent started it again, in this run."""
    last_exit: Exit | None = None
    """Its last exit; None: it has not exited yet."""
    now: Operation | None = None
    events: list[JobEvent] = []
    """Oldest first."""
