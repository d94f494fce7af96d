"""The TaskControl API: requests of the scheduler to a job's controller, and responses.

The names are those of the paper's Figure 8 (`jobHandle`, `allUnhealthyTasks`, `ack`, …). A request
has the complete state, so a controller needs no memory. A controller that was down for an hour has
missed only `completed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec


class _Sent(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False
):
    """Base of types on the wire; unknown fields are ignored."""


class TaskOperation(_Sent, frozen=True, kw_only=True):
    """An operation on a task that the scheduler wants to begin, once it is acknowledged."""

    id: str
    """Id to acknowledge. It does not change while the operation is offered."""
    task: int
    """Index of the task in its job; `web-3` is 3."""
    kind: str
    """`update`, `restart`, `move` or `remove`."""
    cause: str
    """`release`, `resize`, `failure`, `maintenance`, `loan`, `rebalance`, …"""
    reason: str = ""
    machine: str = ""
    """Machine of the task."""
    notice: str = ""
    """Id of the advance notice that caused it; empty: none."""
    deadline: float | None = None
    """When it begins without acknowledgement, in seconds since 1970; None: never."""
    instead: list[str] = []
    """Alternatives that may be acknowledged instead of its kind: `stop` (the task is stopped,
    stays on its machine, and starts again once the machine is back)."""

    @property
    def latest(self) -> float:
        """When it begins without acknowledgement; infinity: never."""
        return inf if self.deadline is None else self.deadline


class CompletedOperation(_Sent, frozen=True, kw_only=True):
    """An operation that ended since the last answered call."""

    id: str
    task: int
    kind: str
    cause: str
    outcome: str
    """`done`, `failed`, or `withdrawn` (no longer needed)."""
    reason: str = ""
    machine: str = ""
    """Present machine of the task; empty: none."""


class AdvanceNotice(_Sent, frozen=True, kw_only=True):
    """Planned work on a machine on which the job has tasks."""

    id: str
    kind: str
    """`maintenance`, `decommission`, `refresh`, `revoked` (its loan is called back)."""
    machine: str
    tasks: list[int]
    """Tasks of the job on this machine."""
    start: float
    """When the scheduler begins to offer operations for it, in seconds since 1970."""
    deadline: float | None = None
    """When the work begins. Remaining tasks are stopped then, unless `tasksSurvive`."""
    expected_duration_s: float | None = None
    """Duration of the work, from the deadline."""
    tasks_survive: bool = False
    """Whether tasks continue while the machine is unreachable, for instance when a switch is
    replaced."""
    reason: str = ""


class UnhealthyTask(_Sent, frozen=True, kw_only=True):
    """A task that does not serve, or that an acknowledged operation may stop at any moment."""

    task: int
    reason: str = ""
    machine: str = ""
    operation: str = ""
    """The acknowledged or running operation on it; empty: none."""


class TaskControlRequest(_Sent, frozen=True, kw_only=True):
    """One call of a job's controller."""

    job_handle: str
    request: list[TaskOperation] = []
    """Operations that wait for acknowledgement."""
    completed: list[CompletedOperation] = []
    advance_notices: list[AdvanceNotice] = []
    all_unhealthy_tasks: list[UnhealthyTask] = []
    """Tasks that are unhealthy for any reason, including acknowledged operations that have not
    ended."""
    sequence_number: int
    """Rises with each call for the job, also across restarts of the control plane."""
    tasks: int
    """Number of tasks of the job, including starting tasks and tasks that are being removed."""
    indexes: list[tuple[int, int]] = []
    """Indexes of the tasks, as first and last of each range; empty: not reported."""
    at: float
    """When the request was made, in seconds since 1970."""

    def gone(self, tasks: Iterable[int]) -> frozenset[int]:
        """Return those of `tasks` that the job no longer has; empty without `indexes`."""
        if not self.indexes:
            return frozenset()
        known = {index for first, last in self.indexes for index in range(first, last + 1)}
        return frozenset(tasks) - known

    @property
    def down(self) -> frozenset[int]:
        """Return the tasks that do not serve, or may stop serving any moment."""
        return frozenset(task.task for task in self.all_unhealthy_tasks)


class Ack(_Sent, frozen=True, kw_only=True):
    """An acknowledgement of an alternative of an operation."""

    operation: str
    instead: str
    """One of the operation's `instead`."""


class TaskControlResponse(_Sent, frozen=True, kw_only=True):
    """The operations that may begin now, in any order."""

    ack: list[str | Ack] = []
    """Ids of operations. Other operations are offered again; unknown ids have no effect."""
