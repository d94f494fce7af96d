"""What a round of a job is based on: what is seen of it, and what would make it more even.

The record is held by its lock until the round has stored it. All else may change meanwhile: a
round of a large job gives the loop back between its parts, and its decision is made beside the
loop. What comes too late wakes the job, so it is looked at in the round after this one. What jobs
share is looked at again when a decision takes of it (docs/adr/0221).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from control_plane.agents.core.seen import SeenMachine, View
from control_plane.agents.region import Region
from control_plane.allocator.core.spread import Repair
from control_plane.api.jobs import JobRecord
from control_plane.runtime.runtime import LARGE
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import Seen
from control_plane.scheduler.core.operations import waits
from control_plane.scheduler.core.rollout import is_quiet
from control_plane.scheduler.idle_jobs import IdleJobs
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.surge_buffer import SurgeBuffer
from control_plane.task_control.core.talk import Heard

_TURN = 100
"""Machines that are looked at before it is asked whether others are to have their turn."""


class Basis:
    """Looks at jobs for their rounds, and knows since when nothing goes on in them."""

    def __init__(
        self,
        region: Region,
        placing: Placements,
        idle_jobs: IdleJobs,
        losses: Losses,
        surge: SurgeBuffer,
    ) -> None:
        self._observations, self._runtime = region.observations, region.runtime
        self._repair_after_s = region.settings.repair_after_s
        self._placements, self._idle_jobs = placing, idle_jobs
        self._losses, self._surge = losses, surge
        self._evened: dict[str, object] = {}
        """Job → how it and its pool stood when nothing was to be gained by a move."""
        self._quiet_since: dict[str, float] = {}
        self._without_room: dict[str, frozenset[int]] = {}
        """Job → since when nothing goes on in it; a time in which we stood still is none."""

    def forget(self, job: str) -> None:
        """Drop what is remembered of a job that is gone."""
        self._evened.pop(job, None)
        self._quiet_since.pop(job, None)
        self._without_room.pop(job, None)

    def stood_still(self) -> None:
        """Let all jobs be quiet from now on."""
        self._quiet_since.clear()

    def standing(self, record: JobRecord) -> tuple[int, int]:
        """Return what the evenness of a job depends on, besides what its machines report."""
        gains = self._placements.index.gains(self._placements.pool_of(record))
        return self._idle_jobs.asked_at.get(record.name, 0), gains

    def even_at(self, record: JobRecord) -> float | None:
        """Return when (steady) the evenness of a quiet job is looked at; None: it was."""
        if self._evened.get(record.name) == self.standing(record):
            return None
        return self._quiet_since.get(record.name, 0.0) + self._repair_after_s

    async def view(self, record: JobRecord, now: Moment) -> View:
        """Return the machines on which tasks of a job are, or may be left."""
        pools, machines = self._placements.pools_of(record), list(machines_of(record))
        found: dict[str, SeenMachine] = {}
        for first in range(0, len(machines), _TURN):
            if first:
                await self._runtime.checkpoint()
            found |= self._observations.view(pools, machines[first : first + _TURN], now.wall)
        return found

    async def seen(
        self,
        record: JobRecord,
        view: View,
        now: Moment,
        heard: Heard,
        *,
        is_asking: bool,
        capped_moves: int | None,
    ) -> tuple[Seen, Sequence[Repair]]:
        """Return what a job's next decision is based on, and the moves that its spread wants.

        `is_asking`: machines are being allocated for it.
        """
        repairs = await self._repairs(record, view, now, is_asking=is_asking)
        claims = self._placements.index.claims.get(record.name)
        if claims is not None and len(record.tasks) >= LARGE:
            claims = claims.copy()  # a thread reads it
        seen = Seen(
            view,
            now,
            claims=claims or (),
            evened=self._placements.evened(record),
            repairs=tuple(repair.task for repair in repairs),
            heard=heard,
            held_back=self._losses.held(record),
            surge_left=self._surge.left(record, self._placements.entitlement_of(record)),
            capped_moves=capped_moves,
            without_room=self._without_room.get(record.name, frozenset()),
        )
        return seen, repairs

    def found(self, name: str, chosen: Iterable[int], without_room: frozenset[int]) -> bool:
        """Note which of a job's chosen tasks found no other place; return whether that is news."""
        known = self._without_room.get(name, frozenset())
        now = known.difference(chosen) | without_room
        if now:
            self._without_room[name] = now
        else:
            self._without_room.pop(name, None)
        return not without_room <= known

    async def _repairs(
        self, record: JobRecord, view: View, now: Moment, *, is_asking: bool
    ) -> Sequence[Repair]:
        """Return moves that make a quiet job more even, if anything changed since the last look.

        One that was proposed and has not begun is looked at each time.
        """
        state = self.standing(record)
        if not is_quiet(record):
            self._quiet_since.pop(record.name, None)
            return ()
        quiet_s = now.steady - self._quiet_since.setdefault(record.name, now.steady)
        is_known = self._evened.get(record.name) == state and not any(map(waits, record.tasks))
        if is_known or quiet_s < self._repair_after_s or is_asking:
            return ()
        self._evened[record.name] = state
        return await self._placements.repairs(record, view)


def machines_of(record: JobRecord) -> Set[str]:
    """Return the machines on which tasks of a job are, or may be left."""
    there = {task.placement.machine for task in record.tasks if task.placement is not None}
    return there | record.leaving.keys()
