"""Collects the input of a job's round: its observed state, and moves that even out its spread.

The job's lock protects the record until the round has stored it. All other state may change
meanwhile: a round of a large job yields to the event loop between its parts, and a thread makes its
decision. A late change wakes the job, so the next round handles it. Resources that jobs share are
checked again when a decision takes from them (docs/adr/0221).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.agents.region import Region
from control_plane.allocator.core.spread import Repair
from control_plane.api.jobs import JobRecord
from control_plane.runtime.runtime import LARGE
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.operations import waits
from control_plane.scheduler.core.rollout import is_quiet
from control_plane.scheduler.idle_jobs import IdleJobs
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.surge_buffer import SurgeBuffer
from control_plane.task_control.core.conversation import ControllerAnswer

_CHUNK = 100
"""Machines that are read between two checkpoints."""


class RoundInputs:
    """Collects the input of rounds, and records since when each job is quiet."""

    def __init__(
        self,
        region: Region,
        placements: Placements,
        idle_jobs: IdleJobs,
        losses: Losses,
        surge: SurgeBuffer,
    ) -> None:
        self._observations, self._runtime = region.observations, region.runtime
        self._repair_after_s = region.settings.repair_after_s
        self._placements, self._idle_jobs = placements, idle_jobs
        self._losses, self._surge = losses, surge
        self._checked_spread: dict[str, object] = {}
        """Job → the state in which no move improved its spread; see `spread_state`."""
        self._quiet_since: dict[str, float] = {}
        """Job → since when it has no operation; the time restarts when this process was paused."""
        self._without_room: dict[str, frozenset[int]] = {}
        """Job → its tasks for which no machine had room when they were last chosen."""

    def forget(self, job: str) -> None:
        """Drop the state of a deleted job."""
        self._checked_spread.pop(job, None)
        self._quiet_since.pop(job, None)
        self._without_room.pop(job, None)

    def restart_quiet_times(self) -> None:
        """Count each job's quiet time from now on: this process was paused."""
        self._quiet_since.clear()

    def spread_state(self, record: JobRecord) -> tuple[int, int]:
        """Return the state on which a job's spread depends, except the reports of its machines."""
        gains = self._placements.index.gains(self._placements.pool_of(record))
        return self._idle_jobs.request_revisions.get(record.name, 0), gains

    def spread_check_at(self, record: JobRecord) -> float | None:
        """Return when (steady) the spread of a quiet job is checked; None: it was checked."""
        if self._checked_spread.get(record.name) == self.spread_state(record):
            return None
        return self._quiet_since.get(record.name, 0.0) + self._repair_after_s

    async def view(self, record: JobRecord, now: Moment) -> View:
        """Return the observed machines on which tasks of a job are, or may be left."""
        pools, machines = self._placements.pools_of(record), list(machines_of(record))
        found: dict[str, ObservedMachine] = {}
        for first in range(0, len(machines), _CHUNK):
            if first:
                await self._runtime.checkpoint()
            found |= self._observations.view(pools, machines[first : first + _CHUNK], now.wall)
        return found

    async def inputs(
        self,
        record: JobRecord,
        view: View,
        now: Moment,
        answer: ControllerAnswer,
        *,
        is_asking: bool,
        capped_moves: int | None,
    ) -> tuple[DecisionInput, Sequence[Repair]]:
        """Return the input of a job's next decision, and the moves that improve its spread.

        `is_asking`: the allocator is choosing machines for the job.
        """
        repairs = await self._repairs(record, view, now, is_asking=is_asking)
        claims = self._placements.index.claims.get(record.name)
        if claims is not None and len(record.tasks) >= LARGE:
            claims = claims.copy()  # a thread reads it
        inputs = DecisionInput(
            view,
            now,
            claims=claims or (),
            even_spread=self._placements.even_spread(record),
            repairs=tuple(repair.task for repair in repairs),
            answer=answer,
            held_back=self._losses.held_back(record),
            surge_left=self._surge.left(record, self._placements.entitlement_of(record)),
            capped_moves=capped_moves,
            without_room=self._without_room.get(record.name, frozenset()),
        )
        return inputs, repairs

    def note_without_room(
        self, name: str, chosen: Iterable[int], without_room: frozenset[int]
    ) -> bool:
        """Note which chosen tasks of a job have no other machine; return whether that is new."""
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
        """Return moves that make a quiet job's spread more even, if its state changed.

        While a proposed operation has not begun, the spread is checked each time.
        """
        state = self.spread_state(record)
        if not is_quiet(record):
            self._quiet_since.pop(record.name, None)
            return ()
        quiet_s = now.steady - self._quiet_since.setdefault(record.name, now.steady)
        is_known = self._checked_spread.get(record.name) == state and not any(
            map(waits, record.tasks)
        )
        if is_known or quiet_s < self._repair_after_s or is_asking:
            return ()
        self._checked_spread[record.name] = state
        return await self._placements.repairs(record, view)


def machines_of(record: JobRecord) -> Set[str]:
    """Return the machines on which tasks of a job are, or may be left."""
    placed_on = {task.placement.machine for task in record.tasks if task.placement is not None}
    return placed_on | record.leaving.keys()
