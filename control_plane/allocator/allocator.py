"""The allocator as the scheduler knows it: machines for a job's tasks, and why some have none.

It keeps the region's index equal to the brokers' records, and to what agents report: that decides
whether a machine takes tasks now. Brokers tell it each change. `transactions` makes allocations.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from agent.api import ProfileState
from control_plane.agents.core.commands import strays
from control_plane.agents.core.restored import is_of_before
from control_plane.agents.observations import Observation
from control_plane.agents.region import Region
from control_plane.allocator.affinity import JobAffinity
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import claiming_cpu, demand_for
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.region_machines import IndexedMachine
from control_plane.allocator.core.request import Allocation, Allowance, Group, Near, Plan, Request
from control_plane.allocator.core.spread import (
    Repair,
    Targets,
    evened,
    gaining,
    next_to_move,
    targets_of,
    trying,
)
from control_plane.allocator.ports import Grants
from control_plane.allocator.quota_usage import QuotaUsage
from control_plane.allocator.quotas import Quotas
from control_plane.allocator.releases import Releases
from control_plane.allocator.resync import Resync
from control_plane.allocator.shards import Member, Shards
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.allocator.transactions import Allocations
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.jobs import JobRecord, JobSpec, bound_to, is_untouched, spec_of
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.policy import Admission
from control_plane.broker.core.capacity import Kinds
from control_plane.broker.core.unavailability import blocking
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
        """`load` reads the records. `name` tells shards of a region apart."""
        self._shards = Shards.of(region)
        self.index = RegionIndex(self._shards.power)
        self.allocations = Allocations(
            store, self.index, region.broker, self.refresh, name, runtime=region.runtime
        )
        self.directory = TaskDirectory()
        self._kinds = Kinds()
        self.region, self.broker, self._portal = region, region.broker, portal
        self.portal = portal
        self._jobs, self._observations = jobs, region.observations
        self._runtime, self._settings = region.runtime, region.settings
        self._by_entitlement: dict[str, dict[str, None]] = defaultdict(dict)
        self._counted = QuotaUsage(self.index, self._runtime.date)
        self.quotas = Quotas(region, portal, self.index, self._counted)
        self.waiting = self.quotas.waiting
        self._member = Member(
            self.index, self.waiting, portal.specs, self.refresh, self._quotas_changed
        )
        self._timed: dict[str, None] = {}
        """Machines whose agents are yet to answer for the first time."""
        self.resync = Resync(self.broker, self.index, self.refresh, self._runtime)
        self.releases = Releases(self.broker, self.index, self.refresh)
        self._away: dict[str, str] = {}
        """Data centers whose brokers did not answer, when that was looked at last."""
        self._quarantined: dict[str, float] = {}
        """Machine → until when it is kept from a profile that it did not reach."""
        self._promises = self.quotas.promises
        self._neighbours = JobAffinity(self.index)
        self._asked: dict[str, tuple[JobSpec, EntitlementRecord, Request]] = {}
        """Job → what `place` was asked for last, by which terms, and what that is as a request."""
        self._loaded = False
        jobs.listen(self._job_changed)
        portal.table.listen(lambda *_: self._shards.quotas_changed())
        region.broker.listen(self._machine_changed, loaded=ignore)
        region.observations.listen(self._machine_seen)
        self.allocations.taking = partial(self._shards.taking, self._member)
        self.allocations.taken = partial(self._shards.taken, self._member)
        self._shards.enter(self._member)

    async def load(self) -> None:
        """Finish what a crash interrupted, then read all allocations (restart in seconds).

        The tables must be loaded. A job of an earlier release has its tasks placed, but no
        allocation: its claims are taken from its record.
        """
        await self.allocations.recover()
        await self.resync.look_at_brokers()
        await self.allocations.load(self.region.owns)
        for job, near in self.allocations.stored.near.items():
            if self._jobs.find(job) is None:  # a job of a program that has no job records
                self._neighbours.note(job, near)
        for record in self._jobs.records():
            if self.region.owns(self.pool_of(record.spec)):
                self._adopt(record)
        self._loaded = True

    async def close(self) -> None:
        """Let what is under way end; other allocators of the region do without this one."""
        await self.allocations.close()
        self._shards.leave(self._member)

    async def run(self) -> None:
        """Make up for events that were missed, until cancelled; a large region takes minutes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._promises.run())
            await self.resync.run(self._settings.resync_s)

    def refresh(self, machines: Iterable[str]) -> None:
        """Bring some machines up to date with their brokers' records and agents."""
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

        The one call for programs that are not our scheduler. Asked again with the same, it
        changes nothing and costs little; with another size or other claims, tasks that can stay
        do. Tasks leave machines that take none any more. `forget` gives everything back.
        Raises `Unprocessable` if there is no such entitlement, `Busy` if others were faster
        again and again.
        """
        request = self._request(spec)
        self._neighbours.note(spec.name, request.near)
        return await self.allocate(request)

    async def plan(self, spec: JobSpec) -> Targets:
        """Return where `place` would put each task, and why some nowhere; changes nothing."""
        request = self._request(spec)
        made = await self._planned(request, request.near)
        return targets_of(request, made, self.index.claims.get(request.job) or ())

    def _request(self, spec: JobSpec) -> Request:
        """Return what a job asks for; the same object for the same job and entitlement."""
        entitlement = self._portal.table.find(spec.entitlement)
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
            near=Near.of(spec),
        )
        self._asked[spec.name] = (spec, entitlement, made)
        return made

    async def allocate(self, request: Request) -> Allocation:
        """Do what a request asks for; durable when this returns (`transactions`)."""
        neighbours = self._neighbours
        if neighbours.begins_alone(request.job):
            try:
                return await self._allocate(request)
            finally:
                neighbours.ended(request.job)
        async with neighbours.turn(request):
            return await self._allocate(request)

    async def _allocate(self, request: Request) -> Allocation:
        if self.waiting.begin(request.job):
            self.allocations.forget_answer(request.job)
        before = self._neighbours.placed(request.job)
        allocation = await self.allocations.allocate(
            request,
            lambda: self.quotas.allowance(request),
            self.quotas.profile(request.pool),
            self._neighbours.bound,
        )
        if before is not None and before != self._neighbours.placed(request.job):
            self.index.loosened(request.pool)
        if allocation.unplaced:
            self.waiting.put(request.job, replace(request, back=()), allocation.gain)
        else:
            self.waiting.drop(request.job)
        return allocation

    async def take(self, machine: str, pool: str) -> bool:
        """Take a free machine for a pool ahead of its tasks; return whether that was done."""
        request = Request("", pool)
        return await self.allocations.take(
            machine, pool, lambda: self.quotas.allowance(request), self.quotas.profile(pool)
        )

    def known(self, request: Request) -> Allocation | None:
        """Return the answer to a request that says the same as the last one, if it still holds."""
        if self.waiting.begin(request.job):
            return None
        allocation = self.allocations.known(self._neighbours.bound(request))
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
        """Return so many moves at most that make a job's spread more even; changes nothing.

        `request` is what the job asks for as it is. Empty: it is even, or as even as there is
        room, or its first preference is not to be spread.
        """
        over, known = evened(request.preferences), self.index.claims.get(request.job)
        if over is None or known is None:
            return ()
        claims, compute = known.copy(), self.region.runtime.compute
        tried, left = await compute(len(claims), next_to_move, claims, over, most)
        if not tried:
            return ()
        made = await self._planned(trying(request, tried, left))
        return await compute(len(claims), gaining, claims, over, made, most)

    async def _planned(self, request: Request, near: Near | None = None) -> Plan:
        request = self._neighbours.bound(request, near)
        steps = planning(self.index, request, self.quotas.allowance(request))
        return await self.allocations.in_steps(steps)

    async def forget(self, job: str) -> None:
        """Give back everything that a job claims."""
        self.waiting.drop(job)
        self._asked.pop(job, None)
        self._neighbours.note(job, None)
        claims = self.index.claims.get(job)
        if claims is not None:
            await self.allocations.allocate(Request(job, claims.pool), Allowance)

    def strays(self, machine: str) -> list[str]:
        """Return tasks of ours that run on a machine although no record places them there."""
        tasks = self._observations.look(machine).tasks
        if aside := self._jobs.set_aside:
            tasks = {name: status for name, status in tasks.items() if status.job not in aside}
        known, observations = self.directory.tasks(machine).keys(), self._observations
        let_go: set[str] = observations.let_go.get(machine, set())
        return [s.task for s in strays(machine, tasks, known, observations.restored, let_go)]

    def unclaimed(self, machine: str) -> set[str]:
        """Return the pools of tasks that run there and that only the store's copy did not know."""
        if not self._observations.restored:
            return set()
        known, restored = self.directory.tasks(machine).keys(), self._observations.restored
        tasks = self._observations.look(machine).tasks
        unknown = {
            s.entitlement
            for name, s in tasks.items()
            if name not in known and is_of_before(s, restored)
        }
        found = {name: self._portal.table.find(name) for name in unknown}
        return {pool_of(name, of.spec) if of is not None else name for name, of in found.items()}

    def jobs_of(self, entitlement: str) -> list[str]:
        """Return the jobs bound to an entitlement."""
        return sorted(self._by_entitlement[entitlement])

    # -- machines

    async def give_back(self, machine: Machine) -> None:
        """Give a machine to the free pool; no task comes there from this moment on.

        What is heard of it meanwhile changes nothing about that.
        """
        await self.releases.give_back(machine)

    def is_giving_back(self, machine: str) -> bool:
        """Return whether a machine is on its way to the free pool."""
        return machine in self.releases

    def must_be_left(self, machine: str) -> bool:
        """Return whether the tasks of a machine must leave it now."""
        return self._counted.leaves(machine)

    async def look_at_clock(self) -> None:
        """Take in what time alone has changed about machines, and what a store would not say."""
        await self.releases.find_out()
        timed, self._timed = self._timed, {}
        await self.resync.in_turns([*timed, *self._counted.special()])
        now = self._runtime.date()
        over = [name for name, until in self._quarantined.items() if until <= now]
        for name in over:
            del self._quarantined[name]
        away, self._away = self._away, self.broker.away()
        if over or away.keys() - self._away.keys():
            self.index.loosened()

    def _quotas_changed(self) -> None:
        self.quotas.changed()
        self.waiting.reorder()
        self.index.loosened()

    def entitlement_of(self, spec: JobSpec) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""
        found = self._portal.table.find(spec.entitlement)
        return found.spec if found is not None else None

    def pool_of(self, spec: JobSpec) -> str:
        """Return the entitlement on whose machines a job's tasks run."""
        entitlement = self.entitlement_of(spec)
        return pool_of(spec.entitlement, entitlement) if entitlement else spec.entitlement

    # -- keeping the index true

    def _as_indexed(self, record: MachineRecord) -> IndexedMachine:
        """Return what the index is told about a machine, and note what else matters of it."""
        if self._counted.note(record):
            self._promises.outdated()
        if record.quarantined_until > self._runtime.date():
            self._quarantined[record.machine] = record.quarantined_until
        capacity, place = self._kinds.capacity(record), self._kinds.place(record)
        blocked = self._blocked(record)
        taken_for = self._shards.pool_of(record.machine, self._member)
        if taken_for is not None:
            return record.machine, capacity, place, taken_for, blocked or "is being taken"
        hold = record.hold
        pool = record.entitlement if hold is None else hold.entitlement
        return record.machine, capacity, place, pool, blocked

    def _blocked(self, record: MachineRecord) -> str:
        """Return why a machine takes no tasks, as a predicate.

        One that still switches its profile takes them: they wait there for the proof.
        """
        if record.state is not MachineState.UP:
            return "is down"
        if record.machine in self.releases:
            return "is being given back"
        if record.hold is not None and not self.allocations.is_taking(record.machine):
            return f"is held for transaction {record.hold.transaction}"
        if record.unavailability and (planned := blocking(record, self._runtime.date())):
            return planned
        observation = self._observations.look(record.machine)
        is_silent = not observation.answering and self.region.follows(record.entitlement)
        if is_silent and not self._is_yet_to_answer(record.machine, observation):
            return "does not answer"
        degraded = observation.profile.state is ProfileState.DEGRADED
        if record.entitlement and degraded and not self._observations.ready(record):
            return f"failed to reach profile {record.profile_wanted!r}"
        if self.directory.leaving(record.machine) or (
            observation.tasks and self.strays(record.machine)
        ):
            return "still runs tasks that moved away"
        if self.unclaimed(record.machine) - {record.entitlement}:
            return "runs tasks that the restored store does not contain: twinectl restored show"
        return ""

    def _is_yet_to_answer(self, machine: str, observation: Observation) -> bool:
        """Return whether an agent was not heard only because we have just begun to ask.

        Otherwise the first agent to answer after a start would get all tasks.
        """
        if observation.was_listed:
            return False
        asked_at = observation.asked_since
        if asked_at is None or self._runtime.now() - asked_at < self._settings.down_after_s:
            self._timed[machine] = None
            return True
        return False

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
        self._timed.pop(name, None)
        if self._counted.forget(name):
            self._promises.outdated()

    def _machine_seen(self, name: str) -> None:
        record = self.broker.table.find(name)
        if record is not None and name in self.index.machines:
            self.index.block(name, self._blocked(record))

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        if is_untouched(before, after):
            return
        changed = self.directory.settle(name, before, after)
        for entitlement in bound_to(before) if before is not None else ():
            self._by_entitlement[entitlement].pop(name, None)
        for entitlement in bound_to(after) if after is not None else ():
            self._by_entitlement[entitlement][name] = None
        self._neighbours.note(name, Near.of(after.spec) if after is not None else None)
        for machine in changed:
            self._machine_seen(machine)
