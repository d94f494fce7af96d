"""The allocator's interface for the scheduler: finds machines for a job's tasks, or says why not.

It keeps the region's index equal to the brokers' records. Brokers report each change to it.
`usability` decides whether a machine takes tasks now; `transactions` makes allocations.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from control_plane.agents.region import Region
from control_plane.allocator.affinity import JobAffinity
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import claiming_cpu, demand_for
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.region_machines import IndexedMachine
from control_plane.allocator.core.request import (
    Allocation,
    Allowance,
    Group,
    NeighbourJobs,
    Plan,
    Request,
)
from control_plane.allocator.core.spread import (
    Repair,
    Targets,
    even_spread,
    improving_moves,
    next_to_move,
    targets_of,
    trial_request,
)
from control_plane.allocator.ports import Grants
from control_plane.allocator.quota_usage import QuotaUsage
from control_plane.allocator.quotas import Quotas
from control_plane.allocator.region_allocators import AllocatorMember, RegionAllocators
from control_plane.allocator.releases import Releases
from control_plane.allocator.resync import Resync
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.allocator.transactions import Allocations
from control_plane.allocator.usability import Usability
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.job_changes import has_same_tasks_and_specs
from control_plane.api.jobs import JobRecord, JobSpec, entitlements_of, spec_of
from control_plane.api.machines import MachineRecord
from control_plane.api.policy import Admission
from control_plane.broker.core.capacity import Kinds
from control_plane.portal.core.pools import pool_of
from control_plane.runtime.table import Table, ignore
from control_plane.store import Store
from wire.errors import Unprocessable


class Allocator:
    """Plans on the index; owns the allocation records through `allocations`."""

    def __init__(
        self,
        region: Region,
        portal: Grants,
        jobs: Table[JobRecord],
        store: Store,
        name: str = "allocator",
    ) -> None:
        """`name` is unique among the allocators of a region."""
        self._shards = RegionAllocators.of(region)
        self.index = RegionIndex(self._shards.power)
        self.allocations = Allocations(
            store, self.index, region.broker, self.refresh, name, runtime=region.runtime
        )
        self.directory = TaskDirectory()
        self._kinds = Kinds()
        self.region, self.broker, self.portal = region, region.broker, portal
        self._jobs = jobs
        self._runtime, self._settings = region.runtime, region.settings
        self._by_entitlement: dict[str, dict[str, None]] = defaultdict(dict)
        self._counted = QuotaUsage(self.index, self._runtime.date)
        self.quotas = Quotas(region, portal, self.index, self._counted)
        self.waiting = self.quotas.waiting
        self._member = AllocatorMember(
            self.index, self.waiting, portal.specs, self.refresh, self._quotas_changed
        )
        self.resync = Resync(self.broker, self.index, self.refresh, self._runtime)
        self.releases = Releases(self.broker, self.index, self.refresh)
        is_taking = self.allocations.is_taking
        self.usability = Usability(region, portal, jobs, self.directory, self.releases, is_taking)
        self._unreachable: dict[str, str] = {}
        """Data centers whose brokers did not answer at the last check, and why."""
        self._quarantined: dict[str, float] = {}
        """Machine → until when it may not get the profile that it failed to reach."""
        self._affinity = JobAffinity(self.index)
        self._asked: dict[str, tuple[JobSpec, EntitlementRecord, Request]] = {}
        """Job → arguments and terms of its last `place`, and the request made from them."""
        self._loaded = False
        self._connect()

    def _connect(self) -> None:
        """Follow the tables and the agents' reports, and join the other allocators."""
        self._jobs.listen(self._job_changed)
        self.portal.table.listen(lambda *_: self._shards.quotas_changed())
        self.broker.listen(self._machine_changed, loaded=ignore)
        self.region.observations.listen(self._machine_seen)
        self.allocations.taking = partial(self._shards.taking, self._member)
        self.allocations.taken = partial(self._shards.taken, self._member)
        self._shards.enter(self._member)

    async def load(self) -> None:
        """Finish transactions that a crash interrupted, then read all allocations.

        The tables must be loaded. A job of an earlier release has placed tasks, but no allocation;
        its claims are derived from its record.
        """
        await self.allocations.recover()
        await self.resync.read_brokers()
        await self.allocations.load(self.region.owns)
        for job, neighbours in self.allocations.stored.neighbours.items():
            if self._jobs.find(job) is None:  # placed by a program without job records
                self._affinity.note(job, neighbours)
        for record in self._jobs.records():
            if self.region.owns(self.pool_of(record.spec)):
                self._adopt(record)
        self._loaded = True

    async def close(self) -> None:
        """Wait for running work, and leave the allocators of the region."""
        await self.allocations.close()
        self._shards.leave(self._member)

    async def run(self) -> None:
        """Find missed changes of machines and keep promises current, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.quotas.promises.run())
            await self.resync.run(self._settings.resync_s)

    def refresh(self, machines: Iterable[str]) -> None:
        """Update machines in the index from their records and their agents' reports."""
        known = []
        for name in machines:
            record = self.broker.table.find(name)
            if record is None:
                self._forget_machine(name)
            else:
                known.append(self._as_indexed(record))
        self.index.put_many(known)

    def _adopt(self, record: JobRecord) -> None:
        claims = self.index.claims.get(record.name)
        missing = []
        for task in record.tasks:
            if task.placement is None or (claims and claims.get(task.index)):
                continue
            machine = self.index.machines.get(task.placement.machine)
            if machine is not None:
                spec = spec_of(record, task)
                demand = demand_for(spec, self.entitlement_of(spec))
                missing.append(Claim(task.index, machine, demand, task.placement.ports or None))
        if missing:
            self.index.restore(record.name, self.pool_of(record.spec), missing)

    # -- requests

    async def place(self, spec: JobSpec) -> Allocation:
        """Give each task of a job a machine, as far as there is room; durable when it returns.

        Programs other than our scheduler call only this. A repetition changes nothing and costs
        little. After a change of size or claims, tasks stay where they can; tasks leave machines
        that take no tasks any more. `forget` gives everything back. Raises `Unprocessable` if there
        is no such entitlement, and `Busy` if other allocations were faster at each attempt.
        """
        request = self._request(spec)
        self._affinity.note(spec.name, request.neighbours)
        return await self.allocate(request)

    async def plan(self, spec: JobSpec) -> Targets:
        """Return where `place` would put each task, or why nowhere; changes nothing."""
        request = self._request(spec)
        made = await self._planned(request, request.neighbours)
        return targets_of(request, made, self.index.claims.get(request.job) or ())

    def _request(self, spec: JobSpec) -> Request:
        """Return the request of a job; the same object for the same job and entitlement."""
        entitlement = self.portal.table.find(spec.entitlement)
        known = self._asked.get(spec.name)
        if known is not None and known[1] is entitlement and known[0] == spec:
            return known[2]
        if entitlement is None:
            raise Unprocessable(
                f"cannot place job {spec.name!r}: there is no entitlement {spec.entitlement!r}",
                hint="twinectl entitlement list",
            )
        demand = demand_for(claiming_cpu(spec, self._settings.default_cpu_cores), entitlement.spec)
        made = Request(
            job=spec.name,
            pool=pool_of(spec.entitlement, entitlement.spec),
            groups=(Group(demand, tuple(range(spec.tasks)), running=False),) if spec.tasks else (),
            preferences=preferences_of(spec, entitlement.spec),
            fit=spec.fit,
            gang=spec.admission is Admission.GANG,
            neighbours=NeighbourJobs.of(spec),
        )
        self._asked[spec.name] = (spec, entitlement, made)
        return made

    async def allocate(self, request: Request) -> Allocation:
        """Carry out a request; the result is durable when this returns (`transactions`)."""
        affinity = self._affinity
        if affinity.begin_alone(request.job):
            try:
                return await self._allocate(request)
            finally:
                affinity.end_alone(request.job)
        async with affinity.turn(request):
            return await self._allocate(request)

    async def _allocate(self, request: Request) -> Allocation:
        if self.waiting.begin(request.job):
            self.allocations.forget_answer(request.job)
        before = self._affinity.placed(request.job)
        allocation = await self.allocations.allocate(
            request,
            lambda: self.quotas.allowance(request),
            self.quotas.profile(request.pool),
            self._affinity.with_terms,
        )
        if before is not None and before != self._affinity.placed(request.job):
            self.index.note_gain(request.pool)
        if allocation.unplaced:
            self.waiting.put(request.job, replace(request, unmoved=()), allocation.gain)
        else:
            self.waiting.drop(request.job)
        return allocation

    async def take(self, machine: str, pool: str) -> bool:
        """Take a free machine for a pool ahead of its tasks; return whether that succeeded."""
        request = Request("", pool)
        return await self.allocations.take(
            machine, pool, lambda: self.quotas.allowance(request), self.quotas.profile(pool)
        )

    def known(self, request: Request) -> Allocation | None:
        """Return the last answer if the request is the same and the answer still holds."""
        if self.waiting.begin(request.job):
            return None
        allocation = self.allocations.known(self._affinity.with_terms(request))
        if allocation is not None and not allocation.unplaced:
            self.waiting.drop(request.job)
        elif allocation is not None:
            self.waiting.put(request.job, request, allocation.gain)
        return allocation

    async def targets(self, request: Request) -> Targets:
        """Return where each task of a request would be: one plan, which changes nothing."""
        made = await self._planned(request)
        return targets_of(request, made, self.index.claims.get(request.job) or ())

    async def repairs(self, request: Request, most: int = 1) -> tuple[Repair, ...]:
        """Return at most `most` moves that make a job's spread more even; changes nothing.

        `request` is the job's present request. The result is empty if the spread is even, no
        machine has room, or the job's first preference is not a spread.
        """
        over, known = even_spread(request.preferences), self.index.claims.get(request.job)
        if over is None or known is None:
            return ()
        claims, compute = known.copy(), self.region.runtime.compute
        tried, left = await compute(len(claims), next_to_move, claims, over, most)
        if not tried:
            return ()
        made = await self._planned(trial_request(request, tried, left))
        return await compute(len(claims), improving_moves, claims, over, made, most)

    async def _planned(self, request: Request, neighbours: NeighbourJobs | None = None) -> Plan:
        request = self._affinity.with_terms(request, neighbours)
        steps = planning(self.index, request, self.quotas.allowance(request))
        return await self.allocations.in_steps(steps)

    async def forget(self, job: str) -> None:
        """Give back everything that a job claims."""
        self.waiting.drop(job)
        self._asked.pop(job, None)
        self._affinity.note(job, None)
        claims = self.index.claims.get(job)
        if claims is not None:
            await self.allocations.allocate(Request(job, claims.pool), Allowance)

    def unexpected_tasks(self, machine: str) -> list[str]:
        """Return our tasks that run on a machine although no record places them there."""
        return self.usability.unexpected_tasks(machine)

    def jobs_of(self, entitlement: str) -> list[str]:
        """Return the jobs bound to an entitlement."""
        return sorted(self._by_entitlement[entitlement])

    # -- machines

    async def give_back(self, machine: Machine) -> None:
        """Give a machine to the free pool; from now on no task is placed there.

        Reports that arrive in the meantime do not change that.
        """
        await self.releases.give_back(machine)

    def must_be_left(self, machine: str) -> bool:
        """Return whether the tasks of a machine must leave it now."""
        return self._counted.leaves(machine)

    async def update_with_time(self) -> None:
        """Update machines that change with time alone, and those with unknown writes."""
        await self.releases.resolve_outcomes()
        awaited, self.usability.awaited = self.usability.awaited, {}
        await self.resync.in_turns([*awaited, *self._counted.special()])
        now = self._runtime.date()
        over = [name for name, until in self._quarantined.items() if until <= now]
        for name in over:
            del self._quarantined[name]
        unreachable, self._unreachable = self._unreachable, self.broker.unreachable()
        if over or unreachable.keys() - self._unreachable.keys():
            self.index.note_gain()

    def _quotas_changed(self) -> None:
        self.quotas.changed()
        self.waiting.reorder()
        self.index.note_gain()

    def entitlement_of(self, spec: JobSpec) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""
        found = self.portal.table.find(spec.entitlement)
        return found.spec if found is not None else None

    def pool_of(self, spec: JobSpec) -> str:
        """Return the entitlement on whose machines a job's tasks run."""
        entitlement = self.entitlement_of(spec)
        return pool_of(spec.entitlement, entitlement) if entitlement else spec.entitlement

    # -- keeping the index current

    def _as_indexed(self, record: MachineRecord) -> IndexedMachine:
        """Return a machine's entry for the index, and record its quota use and quarantine."""
        if self._counted.note(record):
            self.quotas.promises.mark_outdated()
        if record.quarantined_until > self._runtime.date():
            self._quarantined[record.machine] = record.quarantined_until
        capacity, place = self._kinds.capacity(record), self._kinds.place(record)
        blocked = self.usability.blocked(record)
        taken_for = self._shards.pool_of(record.machine, self._member)
        if taken_for is not None:
            return record.machine, capacity, place, taken_for, blocked or "is being taken"
        hold = record.hold
        pool = record.entitlement if hold is None else hold.entitlement
        return record.machine, capacity, place, pool, blocked

    def _machine_changed(
        self, name: str, _before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if after is None:
            self._forget_machine(name)
        elif self._loaded:
            self.index.put(*self._as_indexed(after))

    def _forget_machine(self, name: str) -> None:
        self.index.remove(name)
        self._quarantined.pop(name, None)
        self.usability.awaited.pop(name, None)
        if self._counted.forget(name):
            self.quotas.promises.mark_outdated()

    def _machine_seen(self, name: str) -> None:
        record = self.broker.table.find(name)
        if record is not None and name in self.index.machines:
            self.index.block(name, self.usability.blocked(record))

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        if has_same_tasks_and_specs(before, after):
            return
        changed = self.directory.settle(name, before, after)
        for entitlement in entitlements_of(before) if before is not None else ():
            self._by_entitlement[entitlement].pop(name, None)
        for entitlement in entitlements_of(after) if after is not None else ():
            self._by_entitlement[entitlement][name] = None
        self._affinity.note(name, NeighbourJobs.of(after.spec) if after is not None else None)
        for machine in changed:
            self._machine_seen(machine)
