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

    def decided(
        self, before: JobRecord, made: Decision, entitlement: EntitlementSpec | None, of: int | None
    ) -> None:
        """Count the extra tasks that a decision adds, before they are stored, or let the job wait.

        `of` is the result of `left` when the decision began; a large job's decision takes a while.
        Raises `Conflict` if the decision adds extra tasks, and other jobs changed theirs meanwhile.
        """
        record = made.record
        now = _extra(record)
        if now > _extra(before) and self.left(before, entitlement) != of:
            raise Conflict(
                f"cannot add extra tasks to job {record.name!r}: other jobs of entitlement "
                f"{before.spec.entitlement!r} changed their number just now",
                hint="it is retried",
            )
        extras, name = self._extras[record.spec.entitlement], record.name
        if now > extras.get(name, 0):
            extras[name] = now
        waiting = self._waiting[record.spec.entitlement]
        if made.waits_for_surge:
            waiting.setdefault(name)
        else:
            waiting.pop(name, None)

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        """Count the stored extra tasks; a removed one makes room for that of another job."""
        if has_same_tasks_and_specs(before, after):
            return
        for entitlement in {r.spec.entitlement for r in (before, after) if r is not None}:
            is_here = after is not None and after.spec.entitlement == entitlement
            extras, now = self._extras[entitlement], _extra(after) if is_here and after else 0
            freed = extras.pop(name, 0) - now
            if now:
                extras[name] = now
            if not is_here:
                self._waiting[entitlement].pop(name, None)
            for job in list(self._waiting[entitlement])[: max(0, freed)]:
                self._wake(job)


def _extra(record: JobRecord) -> int:
    return sum(1 for task in record.tasks if task.extra)
