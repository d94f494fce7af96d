"""TaskControl on the wire: what the scheduler asks a job's controller, and the answer.

The names are those of the paper's Figure 8 (`jobHandle`, `allUnhealthyTasks`, `ack`, …). A request
has the complete state: a controller without memory decides as well as one with memory. One that
was away for an hour has missed nothing but `completed`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class _Sent(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False
):
    """Base of what goes over the wire: a reader ignores fields that it does not know."""


class TaskOperation(_Sent, frozen=True, kw_only=True):
    """Something that the scheduler would like to do to a task, once it is acknowledged."""

    id: str
    """Acknowledge this. It stays the same for as long as the operation is offered."""
    task: int
    """Index of the task in its job; `web-3` is 3."""
    kind: str
    """`update`, `restart`, `move` or `remove`."""
    cause: str
    """`release`, `resize`, `failure`, `maintenance`, `loan`, `rebalance`, …"""
    reason: str = ""
    machine: str = ""
    """Where the task is."""
    notice: str = ""
    """The advance notice that it is asked for; empty: none."""
    deadline: float | None = None
    """When it is done without acknowledgement, in seconds since 1970; None: never."""
    instead: list[str] = []
    """What it may be acknowledged as instead of its kind: `stop` (the task is stopped, stays
    where it is, and starts again once the machine is back)."""


class CompletedOperation(_Sent, frozen=True, kw_only=True):
    """An operation that ended since the last call that was answered."""

    id: str
    task: int
    kind: str
    cause: str
    outcome: str
    """`done`, `failed`, or `withdrawn`: it became needless."""
    reason: str = ""
    machine: str = ""
    """Where the task is now; empty: nowhere."""


class AdvanceNotice(_Sent, frozen=True, kw_only=True):
    """Something planned for a machine on which the job has tasks."""

    id: str
    kind: str
    """`maintenance`, `decommission`, `refresh`, `revoked` (its loan is called back)."""
    machine: str
    tasks: list[int]
    """Those of the job that are there."""
    start: float
    """From when on operations are offered for it, in seconds since 1970."""
    deadline: float | None = None
    """When it begins. What is still there then is stopped, unless `tasksSurvive`."""
    expected_duration_s: float | None = None
    """From the deadline on."""
    tasks_survive: bool = False
    """The machine cannot be reached for a while, but its tasks run on: a switch is replaced."""
    reason: str = ""


class UnhealthyTask(_Sent, frozen=True, kw_only=True):
    """A task that does not serve, or that an acknowledged operation may take down any moment."""

    task: int
    reason: str = ""
    machine: str = ""
    operation: str = ""
    """What was acknowledged or is being done to it; empty: nothing."""


class TaskControlRequest(_Sent, frozen=True, kw_only=True):
    """One call of a job's controller."""

    job_handle: str
    request: list[TaskOperation] = []
    """Operations that wait to be acknowledged."""
    completed: list[CompletedOperation] = []
    advance_notices: list[AdvanceNotice] = []
    all_unhealthy_tasks: list[UnhealthyTask] = []
    """For any reason at all, operations that were acknowledged and have not ended included."""
    sequence_number: int
    """Rises with each call of the job, across restarts of the control plane too."""
    tasks: int
    """How many tasks the job has now, those that start or are being removed included."""
    indexes: list[tuple[int, int]] = []
    """Which those are: the first and the last of each run of indexes; empty: it is not said."""
    at: float
    """When it was asked, in seconds since 1970."""

    def gone(self, tasks: Iterable[int]) -> frozenset[int]:
        """Return those of `tasks` that the job does not have any more.

        None, where it is not said which it has.
        """
        if not self.indexes:
            return frozenset()
        known = {index for first, last in self.indexes for index in range(first, last + 1)}
        return frozenset(tasks) - known

    @property
    def down(self) -> frozenset[int]:
        """Return the tasks that do not serve, or may stop serving any moment."""
        return frozenset(task.task for task in self.all_unhealthy_tasks)


class Ack(_Sent, frozen=True, kw_only=True):
    """An acknowledgement of something else than what was asked."""

    operation: str
    instead: str
    """One of the operation's `instead`."""


class TaskControlResponse(_Sent, frozen=True, kw_only=True):
    """What may be done now: any of the operations asked, in any order."""

    ack: list[str | Ack] = []
    """Ids of operations. What is not here is asked again; others have no effect."""
