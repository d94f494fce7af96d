"""Records the ReBalancer's moves as operations of jobs; withdraws those that have not begun."""

from __future__ import annotations

import logging

from control_plane.api.jobs import JobRecord, TaskRecord, task_at
from control_plane.api.operations import Cause, OperationState
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import Table
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.new_tasks import serves
from control_plane.scheduler.core.operations import machine_of, waits
from control_plane.scheduler.core.rebalance_moves import with_rebalance, without_rebalance
from wire.errors import TwineError

log = logging.getLogger(__name__)


class RebalanceOperations:
    """Everything that the ReBalancer may do to jobs."""

    def __init__(self, jobs: Table[JobRecord], runtime: Runtime) -> None:
        self._jobs, self._runtime = jobs, runtime

    async def begin(self, job: str, index: int, to: str, reason: str) -> bool:
        """Record the move of a task; the job's budget applies. Return whether it was recorded."""
        if self._jobs.find(job) is None:
            return False
        now = Moment(self._runtime.date(), self._runtime.now())
        record = await self._jobs.update(job, lambda r: with_rebalance(r, index, to, reason, now))
        taken = self.moving(job, index) == to
        if taken:
            log.info(
                "move of a task recorded", extra={"job": record.name, "task": index, "machine": to}
            )
        return taken

    async def withdraw(self, job: str, index: int) -> None:
        """Withdraw a move that has not begun; a begun move continues."""
        if self._jobs.find(job) is None:
            return
        try:
            await self._jobs.update(job, lambda r: without_rebalance(r, index))
        except TwineError as e:
            log.info(
                "move could not be withdrawn", extra={"job": job, "task": index, "reason": str(e)}
            )

    def moving(self, job: str, index: int) -> str:
        """Return the target machine of a task's ReBalancer move; empty: it has no such move."""
        task = self._find(job, index)
        known = task.operation if task is not None else None
        return known.to_machine if known is not None and known.cause is Cause.REBALANCE else ""

    def has_begun(self, job: str, index: int) -> bool:
        """Return whether a task's operation is running: its move cannot be withdrawn any more."""
        task = self._find(job, index)
        known = task.operation if task is not None else None
        return known is not None and known.state is OperationState.RUNNING

    def serves_on(self, job: str, index: int) -> str:
        """Return the machine on which a task serves; empty: it does not serve."""
        task = self._find(job, index)
        return machine_of(task) if task is not None and serves(task) else ""

    def _find(self, job: str, index: int) -> TaskRecord | None:
        record = self._jobs.find(job)
        return task_at(record, index) if record is not None else None

    def waiting(self) -> list[tuple[str, int]]:
        """Return the moves that have not begun, including those of earlier processes."""
        return [
            (record.name, task.index)
            for record in self._jobs.values()
            for task in record.tasks
            if task.operation is not None
            and task.operation.cause is Cause.REBALANCE
            and task.operation.to_machine
            and waits(task)
        ]
