"""Skips rounds of jobs whose last round changed nothing and whose machines still report the same.

A write of intents that asks for the same, as most writes of an autoscaler do, wakes no job either.

A round builds all that a decision is based on. Most rounds find nothing, since a machine that is
heard again, or one of whose tasks changes, wakes every job that has tasks on it. So a round that
found nothing is remembered with the very record it looked at, and while that is the record and
all its tasks are seen to serve, the next ones are left out. What is not seen in a record or on a
machine (room that came, an agreement that was changed) is looked at in whole rounds still. Tasks
are looked at where there was news of the job or of a machine of its: with 20,000 jobs a look by
the clock at all tasks of each was a quarter of a core.
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
"""In a job without news, one of so many looks by the clock is a whole round."""

_TURN = 200
"""Tasks that are looked at before it is asked whether others are to have their turn."""


@dataclass(slots=True)
class _Idle:
    record: JobRecord
    entitlement: EntitlementSpec | None
    standing: object
    look_at: float
    """When the clock makes it due next …"""
    whole_at: float
    """… and when nothing that is seen will spare it a round."""


class IdleJobs:
    """Which jobs may be left alone, and for how long."""

    def __init__(self, observations: Observations, runtime: Runtime, resync_s: float) -> None:
        self._observations, self._runtime, self._resync_s = observations, runtime, resync_s
        self._known: dict[str, _Idle] = {}
        self.asked_at: dict[str, int] = {}
        """Job → the revision since which its record asks for the same; none: since the start."""
        self._news: set[str] = set()
        """Jobs that were woken since their last round."""

    def follow(self, jobs: JobTable, wake: Callable[[str], None]) -> None:
        """Wake jobs whose records change; not one at rest whose intents ask for the same."""

        def heard(name: str, before: JobRecord | None, after: JobRecord | None) -> None:
            if before is None or after is None or not ask_the_same(before, after):
                self.asked_at[name] = jobs.revision(name)
                wake(name)
            elif (known := self._known.get(name)) is not None and known.record is before:
                known.record = after
            else:
                wake(name)

        jobs.listen(heard, loaded=ignore)

    def heard(self, name: str) -> None:
        """Have the next look at a job be at its tasks, too."""
        self._news.add(name)

    def found_nothing(
        self,
        record: JobRecord,
        entitlement: EntitlementSpec | None,
        standing: object,
        even_at: float | None,
    ) -> None:
        """Remember that a whole round had nothing to do for a record.

        `standing` is what its evenness depends on, which is looked at from `even_at` on (steady
        seconds); None: nothing was to be gained there.
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
        """Return for how many seconds a job may be left alone; None: it needs a round.

        What changes meanwhile wakes the job, which is at work: it is looked at again.
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
        """Have the next round be a whole one."""
        self._known.pop(name, None)

    def gone(self, name: str) -> None:
        """Keep nothing of a job that is no more."""
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
