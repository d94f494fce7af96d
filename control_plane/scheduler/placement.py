"""Converts a job's record into requests to the allocator, and calls it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Set

from msgspec.structs import replace

from agent.api import ImageTrust, TaskSpec
from agent.api.volumes import VolumeKind
from control_plane.agents.core.commands import Start
from control_plane.agents.core.observed import View
from control_plane.allocator.core.claims import Change
from control_plane.allocator.core.demand import Demand, demand_for
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.request import (
    Allowance,
    Group,
    Request,
    UnmovedTask,
    same_claim,
)
from control_plane.allocator.core.spread import Repair, Target, Targets, even_spread
from control_plane.allocator.core.weighted_spread import EvenSpread
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, spec_of
from control_plane.api.policy import Admission
from control_plane.scheduler.core.job_request import VersionPool, only_on, request_of
from control_plane.scheduler.core.owner_moves import wanted_machine
from control_plane.scheduler.core.rollout import UNPLACED, tasks_to_place
from control_plane.scheduler.core.task_spec import task_spec
from control_plane.scheduler.ports import Places

_AT_ONCE = 3
"""Moves for a better spread that begin together at most; the budget may allow fewer."""


class Placements:
    """The scheduler's calls to the allocator."""

    def __init__(self, allocator: Places, owns: Callable[[str], bool] = lambda _pool: True) -> None:
        """`owns(pool)` returns whether the pool belongs to this shard."""
        self.allocator, self.owns = allocator, owns
        self.index = allocator.index
        self._requests: dict[str, tuple[JobRecord, EntitlementSpec | None, Request]] = {}
        """Job → its cached request, valid for the same record and entitlement specification."""

    def forget(self, job: str) -> None:
        """Drop the cached request of a deleted job."""
        self._requests.pop(job, None)

    def are_ours(self, record: JobRecord | None) -> bool:
        """Return whether the job exists and this shard places its tasks."""
        return record is not None and self.owns(self.pool_of(record))

    def pool_of(self, record: JobRecord) -> str:
        """Return the entitlement on whose machines a job's tasks run."""
        return self.allocator.pool_of(record.spec)

    def pools_of(self, record: JobRecord) -> dict[str, str]:
        """Return the pool of each entitlement that a version of a job is in."""
        pools = {record.spec.entitlement: self.pool_of(record)}
        for spec in record.specs.values():
            if spec.entitlement not in pools:
                pools[spec.entitlement] = self.allocator.pool_of(spec)
        return pools

    def _version_pools(self, record: JobRecord) -> dict[int, VersionPool]:
        """Return the pools of earlier versions that are in another entitlement."""
        if len(record.specs) < 2:
            return {}
        return {
            version: VersionPool(self.allocator.pool_of(spec), self.allocator.entitlement_of(spec))
            for version, spec in record.specs.items()
            if spec.entitlement != record.spec.entitlement
        }

    def entitlement_of(self, record: JobRecord) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""
        return self.allocator.entitlement_of(record.spec)

    def image_keys(self, spec: JobSpec) -> list[str]:
        """Return the keys that may sign a job's image now; empty: it needs no signature."""
        entitlement = self.allocator.entitlement_of(spec)
        return [] if entitlement is None else entitlement.image_keys

    def task_spec(self, spec: JobSpec, start: Start, epoch: int) -> TaskSpec:
        """Return the specification of a task for the agent that has to start it."""
        made = task_spec(
            spec, start.index, start.placement, generation=start.generation, epoch=epoch
        )
        return replace(made, image_trust=ImageTrust(keys=self.image_keys(spec)))

    def request(self, record: JobRecord, view: View) -> Request | None:
        """Return a job's present request to the allocator; None: it has no tasks and no claims."""
        if not record.tasks and record.name not in self.index.claims:
            return None
        request, unmoved = self._request(record, view), self._unmoved(record, view)
        return dataclasses.replace(request, unmoved=unmoved) if unmoved else request

    def _request(self, record: JobRecord, view: View) -> Request:
        entitlement, known = self.entitlement_of(record), self._requests.get(record.name)
        if known is not None and known[0] is record and known[1] is entitlement:
            return known[2]
        claims, version_pools = self.index.claims.get(record.name), self._version_pools(record)
        request = request_of(record, view, self.pool_of(record), entitlement, claims, version_pools)
        if not version_pools and not any(task.phase in UNPLACED for task in record.tasks):
            self._requests[record.name] = (record, entitlement, request)
        return request

    def even_spread(self, record: JobRecord) -> EvenSpread | None:
        """Return the bins over which a job is to be spread evenly; None: over none."""
        return even_spread(preferences_of(record.spec, self.entitlement_of(record)))

    async def repairs(self, record: JobRecord, view: View) -> tuple[Repair, ...]:
        """Return a few moves that make a job's spread more even; changes nothing.

        Returns none for jobs with persistent volumes: moving tasks would lose their content.
        """
        if any(v.kind is VolumeKind.PERSISTENT for v in record.spec.volumes.values()):
            return ()
        most = min(_AT_ONCE, record.spec.update.max_unavailable)
        if most < 1:
            return ()
        return await self.allocator.repairs(self._request(record, view), most)

    def _unmoved(self, record: JobRecord, view: View) -> tuple[UnmovedTask, ...]:
        """Return the tasks that stay on their machine but are claimed on another one.

        Their move was allocated, but the job's record was not written. Then the machine that
        they were to leave became usable again.
        """
        claims = self.index.claims.get(record.name)
        if claims is None:
            return ()
        machines, pools = claims.machines, self.pools_of(record)
        elsewhere: list[tuple[UnmovedTask, str | None]] = []
        for task in record.tasks:
            claimed = machines[task.index] if task.index < len(machines) else None
            if claimed is None or task.placement is None:
                continue
            if claimed.name != task.placement.machine:
                unmoved = UnmovedTask(task.index, task.placement.machine, task.placement.ports)
                elsewhere.append((unmoved, pools.get(spec_of(record, task).entitlement)))
        moving = {task.index for task in tasks_to_place(record, view)} if elsewhere else ()
        return tuple(
            unmoved
            for unmoved, pool in elsewhere
            if unmoved.task not in moving
            and (machine := self.index.machines.get(unmoved.machine)) is not None
            and machine.pool == pool
        )

    async def targets(
        self, record: JobRecord, tasks: Mapping[int, JobSpec], moving: Set[int]
    ) -> Targets:
        """Return where tasks would go with these specifications, in one plan; changes nothing.

        Tasks in `moving` must leave their machine; others stay if their claim is unchanged.
        """
        entitlement = self.entitlement_of(record)
        of_spec = {id(spec): demand_for(spec, entitlement) for spec in tasks.values()}
        demands = {task: of_spec[id(spec)] for task, spec in tasks.items()}
        claims, pool = self.index.claims.get(record.name), self.pool_of(record)
        staying, replanned, left = dict[int, Target](), set[int](), set[str]()
        for task, demand in demands.items():
            known = claims.get(task) if claims is not None else None
            is_here = known is not None and known.machine.pool == pool and task not in moving
            if is_here and known is not None and same_claim(known.demand, demand):
                staying[task] = Target(known.machine.name)
                continue
            replanned.add(task)
            if known is not None and task in moving:
                left.add(known.machine.name)
        if not replanned:
            return Targets(staying)
        others: dict[tuple[Demand, str], list[int]] = defaultdict(list)
        for claim in claims or ():
            if claim.task not in replanned:
                others[claim.demand, claim.machine.pool].append(claim.task)
        groups = [Group(d, tuple(those), elsewhere=where) for (d, where), those in others.items()]
        to = {task.index: wanted_machine(task) for task in record.tasks if task.index in replanned}
        alike: dict[tuple[Demand, bool, str], list[int]] = defaultdict(list)
        for task in sorted(replanned):
            alike[demands[task], task in moving, to.get(task, "")].append(task)
        for (demand, leaves, where), those in alike.items():
            leave, among = frozenset(left if leaves else ()), only_on(where)
            group = Group(demand, tuple(those), leave=leave, running=False, among=among)
            groups.append(group)
        preferences = preferences_of(record.spec, entitlement)
        request = Request(record.name, pool, tuple(groups), preferences, record.spec.fit)
        found = await self.allocator.targets(request)
        return Targets(found.of | staying, found.reasons)

    async def plan_final(
        self, record: JobRecord, tasks: tuple[int, ...]
    ) -> tuple[Change, tuple[int, ...], tuple[str, ...]]:
        """Return the plan for a job with these tasks; changes nothing.

        The plan is the change, the tasks without a machine, and the reasons. Other actors run
        meanwhile.
        """
        entitlement, pool = self.entitlement_of(record), self.pool_of(record)
        groups = (Group(demand_for(record.spec, entitlement), tasks, running=False),)
        preferences = preferences_of(record.spec, entitlement)
        gang = record.spec.admission is Admission.GANG
        request = Request(record.name, pool, groups, preferences, record.spec.fit, gang)
        steps = planning(self.index, request, self.allocator.quotas.allowance(request))
        made = await self.allocator.allocations.in_steps(steps)
        return made.change, made.unplaced, made.reasons

    def allowance(self, record: JobRecord) -> Allowance:
        """Return what the pool of a job may take from the free pool."""
        pool = self.pool_of(record)
        return self.allocator.quotas.allowance(Request(record.name, pool))
