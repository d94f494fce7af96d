"""Skips rounds of jobs whose last round changed nothing and whose machines still report the same.

A write of intents that requests the same as before wakes no job. Most writes of an autoscaler do.

A full round builds the whole input of a decision. Most rounds find nothing to do, because each
report of a machine wakes every job with tasks on it. So a round that found nothing is remembered
with the record that it examined. While the job has this record and all its tasks serve, its next
rounds are skipped. Some changes are in no record and no report, such as new room or a changed
entitlement. A full round at a longer interval finds them. Tasks are examined only after news of
the job or its machines: with 20,000 jobs, periodic checks of all tasks took a quarter of a core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from control_plane.agents.observations import Observations
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord
from control_plane.job_control.core.intents import ask_the_same
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.runtime import Runtime
from control_plane.runtime.table import ignore
from control_plane.scheduler.core.reconcile import serves_as_seen
from control_plane.scheduler.core.rollout import is_quiet

_WHOLE_EVERY = 10
"""Periodic checks of a job without news: one in this many is a full round."""
_TURN = 200
"""Tasks that are checked between two checkpoints."""


@dataclass(slots=True)
class _Idle:
    record: JobRecord
    entitlement: EntitlementSpec | None
    standing: object
    look_at: float
    """Time of the next periodic check …"""
    whole_at: float
    """… and of the next full round, whatever the machines report."""


class IdleJobs:
    """The jobs whose rounds may be skipped, and until when."""

    def __init__(self, observations: Observations, runtime: Runtime, resync_s: float) -> None:
        self._observations, self._runtime, self._resync_s = observations, runtime, resync_s
        self._known: dict[str, _Idle] = {}
        self.asked_at: dict[str, int] = {}
        """Job → the revision since which its record requests the same; none: since the start."""
        self._news: set[str] = set()
        """Jobs that were woken since their last round."""

    def follow(self, jobs: JobTable, wake: Callable[[str], None]) -> None:
        """Wake jobs whose records change, except an idle job whose intents request the same."""

        def record_changed(name: str, before: JobRecord | None, after: JobRecord | None) -> None:
            if before is None or after is None or not ask_the_same(before, after):
                self.asked_at[name] = jobs.revision(name)
                wake(name)
            elif (known := self._known.get(name)) is not None and known.record is before:
                known.record = after
            else:
                wake(name)

        jobs.listen(record_changed, loaded=ignore)

    def note_news(self, name: str) -> None:
        """Make the next check of a job examine its tasks, too."""
        self._news.add(name)

    def found_nothing(
        self,
        record: JobRecord,
        entitlement: EntitlementSpec | None,
        standing: object,
        even_at: float | None,
    ) -> None:
        """Remember that a full round had nothing to do for a record.

        `standing` is the state on which the job's spread depends. The spread is checked from
        `even_at` on (steady seconds); None: no move would improve it.
        """
        if not is_settled(record):
            self.forget(record.name)
            return
        look_at = self._runtime.now() + self._resync_s
        whole_at = look_at + self._resync_s * (_WHOLE_EVERY - 1)
        if even_at is not None:
            whole_at = min(whole_at, even_at)
        self._known[record.name] = _Idle(record, entitlement, standing, look_at, whole_at)

    async def rests_s(
        self, record: JobRecord, entitlement: EntitlementSpec | None, standing: object, pool: str
    ) -> float | None:
        """Return for how many seconds rounds of a job may be skipped; None: it needs one now.

        A change during this call wakes the job again.
        """
        known, now = self._known.get(record.name), self._runtime.now()
        is_news = record.name in self._news
        self._news.discard(record.name)
        if known is None:
            return None
        is_same = known.record is record and known.entitlement is entitlement
        if now >= known.look_at and (now >= known.whole_at or known.standing != standing):
            is_same = False
        if not is_same or (is_news and not await self._serve(record, pool)):
            self.forget(record.name)
            return None
        if now >= known.look_at:
            known.look_at = now + self._resync_s
        return known.look_at - now

    def forget(self, name: str) -> None:
        """Make the next round a full one."""
        self._known.pop(name, None)

    def gone(self, name: str) -> None:
        """Drop the state of a job that no longer exists."""
        self.forget(name)
        self._news.discard(name)
        self.asked_at.pop(name, None)

    async def _serve(self, record: JobRecord, pool: str) -> bool:
        steady, tasks = self._observations.steady, record.tasks
        for first in range(0, len(tasks), _TURN):
            if first:
                await self._runtime.checkpoint()
            for task in tasks[first : first + _TURN]:
                there = steady(task.placement.machine, pool) if task.placement is not None else None
                if there is None or not serves_as_seen(record.name, task, there):
                    return False
        return True


def is_settled(record: JobRecord) -> bool:
    """Return whether neither time alone nor an approval can change anything about a job."""
    return (
        is_quiet(record)
        and not record.paused
        and record.spec.controller is None
        and not any(task.operation is not None or task.extra for task in record.tasks)
    )
