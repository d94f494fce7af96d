"""The status of this process and of the region, and lookups for access control.

It also says whether voluntary moves of tasks must wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent.api import Liveness
from control_plane.api.limits import LimitName
from control_plane.api.ownership import ShardLoad
from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.health.checker import HealthChecker
from control_plane.health.service import HealthService
from control_plane.portal.portal import Portal
from control_plane.rebalancer.rebalancer import ReBalancer
from control_plane.running_shards import RunningShards
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.limits import LimitRegistry
from control_plane.runtime.loops import Loops
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.restored import RestoredStore
from control_plane.shards.processes import OwnRole, RoleLeaders
from control_plane.shards.status import own_status, problems_of, with_lag
from control_plane.store import Store

NEEDS_ONE_PROCESS = (
    "shards run in other processes, and ReBalancer and loans need all tasks in one process"
)
"""Why the ReBalancer and loans do nothing where shards are processes."""


class StatusCalls:
    """Answers about the state of the services; a part of `ControlPlane`."""

    counters: Counters
    health: HealthService
    limits: LimitRegistry
    processes: RoleLeaders | None
    quarantined: list[str]
    rebalancer: ReBalancer
    restored: RestoredStore
    role: OwnRole
    shards: RunningShards
    _checker: HealthChecker
    _jobs: JobTable
    _loops: Loops | None
    _portal: Portal
    _runtime: Runtime
    _store: Store
    _stores: list[Store]

    async def ready(self) -> Liveness:
        """Return whether everything is loaded and every loop runs."""
        return self._readiness()

    def _readiness(self) -> Liveness:
        if self._loops is None:
            return Liveness(ok=False, detail="the stores are not loaded yet")
        for store in self._stores:
            if failure := store.failure():
                return Liveness(ok=False, detail=failure)
        if failures := self._loops.failures():
            return Liveness(ok=False, detail=failures)
        alarm = f"{len(self.quarantined)} damaged records are set aside" * bool(self.quarantined)
        details = [
            self.restored.describe_wait(),
            self._checker.restored.describe(),
            self._checker.held.brake,
        ]
        details += [alarm, self.rebalancer.alarm()]
        return Liveness(ok=True, detail="; ".join(filter(None, details)))

    def process_counts(self, loads: Sequence[ShardLoad] = ()) -> ProcessStatus:
        """Return the status of this process; `loads` has its numbers of jobs and tasks."""
        followed, state = self._checker.followed_count, self._readiness()
        return own_status(self.role, state, self._store, self.processes, loads, followed)

    def region_status(self, others: Sequence[ProcessStatus] = ()) -> RegionStatus:
        """Return the status of the region; `others` are the statuses of other processes."""
        loads = self.shards.loads()
        own = self.process_counts(loads)
        statuses = with_lag([own, *others], self._store.revision())
        machines = {state.value: n for state, n in self.counters.machines.items()}
        limits = self.limits.views(self._runtime.now()).limits
        found = problems_of(statuses, loads, machines, limits, self.health.count())
        return RegionStatus(
            ok=not found,
            troubles=found,
            machines=machines,
            tasks={phase.value: n for phase, n in self.counters.tasks.items()},
            entitlements=len(self._portal.table),
            processes=statuses,
            shards=loads,
        )

    def _why_moves_wait(self) -> str:
        """Return why voluntary moves of tasks must wait; empty: they may begin."""
        if self.shards.count > len(self.shards.all):
            return NEEDS_ONE_PROCESS
        held = (LimitName.STOPS, LimitName.CAPPED_MOVES, LimitName.CAPACITY, LimitName.MARK_DOWN)
        limits = self.limits.views(self._runtime.now()).limits
        reasons = (f"limit {v.name}: {v.reason}" for v in limits if v.name in held and v.reason)
        states = (
            self.restored.describe_wait(),
            self._checker.restored.describe(),
            self._checker.held.brake,
        )
        return next(filter(None, (*states, *reasons)), "")

    # -- lookups for access control

    def owners_of(self, entitlement: str) -> Sequence[str] | None:
        """Return the owners of an entitlement, if there is such an entitlement."""
        record = self._portal.table.find(entitlement)
        return None if record is None else record.spec.owners

    def entitlement_names(self) -> Iterable[str]:
        """Return the names of all entitlements."""
        return self._portal.table.names()

    def revision_of(self, kind: str, name: str) -> int | None:
        """Return the revision of the record of a job or an entitlement; 0: there is none."""
        if kind == "job":
            return self._jobs.revision(name)
        return self._portal.table.revision(name) if kind == "entitlement" else None
