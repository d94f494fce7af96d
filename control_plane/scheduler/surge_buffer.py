"""A buffer of extra tasks that all jobs of an entitlement share (JC12, SC21).

A job of one task that must always serve needs a second one only while it is updated or leaves its
machine. Where the entitlement says how many such tasks there may be at once (`surge_tasks`), a job
waits for its turn. So hundreds of jobs need room for those few, and not twice their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, is_untouched
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.decision import Decision
from wire.errors import Conflict


class SurgeBuffer:
    """How many extra tasks there are by entitlement, and which jobs wait to have one."""

    def __init__(self, jobs: JobTable, wake: Callable[[str], None]) -> None:
        """`wake` is called with a job that waited, when there may be room for it."""
        self._wake = wake
        self._extras: dict[str, dict[str, int]] = defaultdict(dict)
        """Entitlement → job → extra tasks that it has, or is about to store."""
        self._waiting: dict[str, dict[str, None]] = defaultdict(dict)
        """Entitlement → jobs that wait, the longest first."""
        jobs.listen(self._job_heard)

    def left(self, record: JobRecord, entitlement: EntitlementSpec | None) -> int | None:
        """Return how many extra tasks a job may have in all; None: as many as it says itself."""
        if entitlement is None or entitlement.surge_tasks is None:
            return None
        extras = self._extras[record.spec.entitlement]
        others = sum(extras.values()) - extras.get(record.name, 0)
        return max(0, entitlement.surge_tasks - others)

    def decided(
        self, before: JobRecord, made: Decision, entitlement: EntitlementSpec | None, of: int | None
    ) -> None:
        """Count what a job is about to have from now on, stored or not, and let it wait.

        `of` is what `left` returned when the decision began: that about a large job takes a while.
        Raises `Conflict` if it adds extra tasks, and others have some more or fewer by now.
        """
        record = made.record
        now = _extra(record)
        if now > _extra(before) and self.left(before, entitlement) != of:
            raise Conflict(
                f"cannot add extra tasks to job {record.name!r}: other jobs of entitlement"
                f" {before.spec.entitlement!r} took or gave back some just now",
                hint="it is tried again",
            )
        extras, name = self._extras[record.spec.entitlement], record.name
        if now > extras.get(name, 0):
            extras[name] = now
        waiting = self._waiting[record.spec.entitlement]
        if made.waits_for_surge:
            waiting.setdefault(name)
        else:
            waiting.pop(name, None)

    def _job_heard(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        """Take in what is stored now; where an extra task went, another job may have one."""
        if is_untouched(before, after):
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
