"""A buffer of extra tasks that all jobs of an entitlement share (JC12, SC21).

A job of one task that must always serve needs a second task only while it is updated or leaves its
machine. `surge_tasks` of the entitlement limits these extra tasks, and a job waits for its turn. So
hundreds of jobs need room for a few extra tasks, instead of twice their own number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.job_changes import has_same_tasks_and_specs
from control_plane.api.jobs import JobRecord
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.decision import Decision
from wire.errors import Conflict


class SurgeBuffer:
    """The number of extra tasks of each entitlement, and the jobs that wait for one."""

    def __init__(self, jobs: JobTable, wake: Callable[[str], None]) -> None:
        """`wake` is called with a job that waited, when there may be room for it."""
        self._wake = wake
        self._extras: dict[str, dict[str, int]] = defaultdict(dict)
        """Entitlement → job → extra tasks that it has, or is about to store."""
        self._waiting: dict[str, dict[str, None]] = defaultdict(dict)
        """Entitlement → jobs that wait, the longest first."""
        jobs.listen(self._job_changed)

    def left(self, record: JobRecord, entitlement: EntitlementSpec | None) -> int | None:
        """Return how many extra tasks a job may have in all; None: no shared limit."""
        if entitlement is None or entitlement.surge_tasks is None:
            return None
        extras = self._extras[record.spec.entitlement]
        others = sum(extras.values()) - extras.get(record.name, 0)
        return max(0, entitlement.surge_tasks - others)

    def reserve(
        self,
        before: JobRecord,
        decision: Decision,
        entitlement: EntitlementSpec | None,
        left_before: int | None,
    ) -> None:
        """Count the extra tasks that a decision adds, before they are stored, or let the job wait.

        `left_before` is the result of `left` when the decision began; a large job's decision takes
        a while. Raises `Conflict` if the decision adds extra tasks, and other jobs changed theirs
        meanwhile. Extra tasks of an earlier decision that was not stored no longer count.
        """
        record = decision.record
        wanted, stored = _extras_of(record), _extras_of(before)
        if wanted > stored and self.left(before, entitlement) != left_before:
            raise Conflict(
                f"cannot add extra tasks to job {record.name!r}: other jobs of entitlement "
                f"{before.spec.entitlement!r} changed their number just now",
                hint="it is retried",
            )
        waiting = self._waiting[record.spec.entitlement]
        if decision.waits_for_surge:
            waiting.setdefault(record.name)
        else:
            waiting.pop(record.name, None)
        self._count(record.spec.entitlement, record.name, max(wanted, stored))

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        """Count the stored extra tasks; a removed one makes room for that of another job."""
        if has_same_tasks_and_specs(before, after):
            return
        for entitlement in {r.spec.entitlement for r in (before, after) if r is not None}:
            is_in_it = after is not None and after.spec.entitlement == entitlement
            if not is_in_it:
                self._waiting[entitlement].pop(name, None)
            self._count(entitlement, name, _extras_of(after) if is_in_it and after else 0)

    def _count(self, entitlement: str, job: str, number: int) -> None:
        """Set the extra tasks of a job; wake a waiting job for each one fewer than before."""
        extras = self._extras[entitlement]
        freed = extras.pop(job, 0) - number
        if number:
            extras[job] = number
        for waiting in list(self._waiting[entitlement])[: max(0, freed)]:
            self._wake(waiting)


def _extras_of(record: JobRecord) -> int:
    return sum(1 for task in record.tasks if task.extra)
