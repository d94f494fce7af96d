"""Skips rounds of jobs whose last round changed nothing and whose machines still report the same.

A full round builds the whole input of a decision. Most rounds find nothing to do, because each
report of a machine wakes every job with tasks on it. So a round that found nothing is remembered
with the record that it examined. While the job has this record and all its tasks serve, its next
rounds are skipped. Some changes are in no record and no report, such as new room or a changed
entitlement. A full round at a longer interval finds them. Tasks are examined only after the job was
woken: with 20,000 jobs, periodic checks of all tasks took a quarter of a core.

A write of intents that requests the same as before wakes no job. Most writes of an autoscaler do
so.
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
from control_plane.scheduler.core.reconcile import serves_unchanged
from control_plane.scheduler.core.rollout import is_quiet

_FULL_ROUND_EVERY = 10
"""One in this many periodic checks of an idle job is a full round."""
_CHUNK = 200
"""Tasks that are checked between two checkpoints."""


@dataclass(slots=True)
class _Idle:
    record: JobRecord
    entitlement: EntitlementSpec | None
    spread_state: object
    check_at: float
    """Time of the next periodic check."""
    full_round_at: float
    """Time of the next full round, whatever the machines report."""


class IdleJobs:
    """The jobs whose rounds may be skipped, and until when."""

    def __init__(self, observations: Observations, runtime: Runtime, resync_s: float) -> None:
        self._observations, self._runtime, self._resync_s = observations, runtime, resync_s
        self._known: dict[str, _Idle] = {}
        self.request_revisions: dict[str, int] = {}
        """Job → the revision since which its record requests the same; none: since the start."""
        self._woken: set[str] = set()
        """Jobs that were woken since their last round."""

    def follow(self, jobs: JobTable, wake: Callable[[str], None]) -> None:
        """Wake jobs whose records change, except an idle job whose intents request the same."""

        def record_changed(name: str, before: JobRecord | None, after: JobRecord | None) -> None:
            if before is None or after is None or not ask_the_same(before, after):
                self.request_revisions[name] = jobs.revision(name)
                wake(name)
            elif (known := self._known.get(name)) is not None and known.record is before:
                known.record = after
            else:
                wake(name)

        jobs.listen(record_changed, loaded=ignore)

    def note_wakeup(self, name: str) -> None:
        """Make the next check of a job examine its tasks, too."""
        self._woken.add(name)

    def note_idle(
        self,
        record: JobRecord,
        entitlement: EntitlementSpec | None,
        spread_state: object,
        spread_check_at: float | None,
    ) -> None:
        """Remember that a full round had nothing to do for a record.

        `spread_state` is the state on which the job's spread depends. The spread is checked from
        `spread_check_at` on (steady seconds); None: no move would improve it.
        """
        if not is_settled(record):
            self.forget(record.name)
            return
        check_at = self._runtime.now() + self._resync_s
        full_round_at = check_at + self._resync_s * (_FULL_ROUND_EVERY - 1)
        if spread_check_at is not None:
            full_round_at = min(full_round_at, spread_check_at)
        self._known[record.name] = _Idle(record, entitlement, spread_state, check_at, full_round_at)

    async def skip_s(
        self,
        record: JobRecord,
        entitlement: EntitlementSpec | None,
        spread_state: object,
        pool: str,
    ) -> float | None:
        """Return for how many seconds rounds of a job may be skipped; None: it needs one now.

        A change during this call wakes the job again.
        """
        known, now = self._known.get(record.name), self._runtime.now()
        was_woken = record.name in self._woken
        self._woken.discard(record.name)
        if known is None:
            return None
        is_same = known.record is record and known.entitlement is entitlement
        if now >= known.check_at and (
            now >= known.full_round_at or known.spread_state != spread_state
        ):
            is_same = False
        if not is_same or (was_woken and not await self._all_serve(record, pool)):
            self.forget(record.name)
            return None
        if now >= known.check_at:
            known.check_at = now + self._resync_s
        return known.check_at - now

    def forget(self, name: str) -> None:
        """Make the next round a full one."""
        self._known.pop(name, None)

    def drop(self, name: str) -> None:
        """Drop the state of a job that no longer exists."""
        self.forget(name)
        self._woken.discard(name)
        self.request_revisions.pop(name, None)

    async def _all_serve(self, record: JobRecord, pool: str) -> bool:
        steady, tasks = self._observations.steady, record.tasks
        for first in range(0, len(tasks), _CHUNK):
            if first:
                await self._runtime.checkpoint()
            for task in tasks[first : first + _CHUNK]:
                statuses = (
                    steady(task.placement.machine, pool) if task.placement is not None else None
                )
                if statuses is None or not serves_unchanged(record.name, task, statuses):
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
