"""The allocator as the scheduler knows it: machines for a job's tasks, and why some have none.

It keeps the region's index true: to the brokers' records, of which it hears each change, and
to what agents say, which decides whether a machine takes tasks now. Allocations themselves
are made by `services.allocations`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from agent.api import ProfileState
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.policy import Admission
from control_plane.api.settings import Overgrant
from control_plane.core.feasibility import Demand, Kinds, judge
from control_plane.core.job_request import (
    Answer,
    answer_of,
    demand_for,
    preferences_of,
    request_of,
)
from control_plane.core.machine_pools import Machine
from control_plane.core.planner import Allowance, Group, Request, plan, planning, same_claim
from control_plane.core.pools import Quota, pool_of, pool_quotas
from control_plane.core.reconcile import View, spec_of, strays
from control_plane.core.region_index import Change, Claim, IndexedMachine, RegionIndex
from control_plane.core.rollout import Placed, to_place, wanted_tasks
from control_plane.core.unavailability import MOVING, blocking, leaving
from control_plane.services.allocations import Allocations
from control_plane.services.fleet import Sight
from control_plane.services.promises import Limits, PromiseKeeper
from control_plane.services.region import Region
from control_plane.services.table import ignore
from control_plane.services.usage import TaskDirectory
from control_plane.services.waiting import Waiting
from control_plane.store import Store

STEP = 1_000
"""Machines that are looked at between two turns of the event loop."""
_RESYNC_PAUSE_S = 0.5
"""After each of these steps, so that keeping up costs little of a large region's time."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a task would go."""

    machine: str
    """Empty: nowhere."""
    is_taken: bool = False
    """It would have to be taken from the free pool."""
    reasons: tuple[str, ...] = ()


class Allocator:
    """Plans on the index; owns the allocation records through `allocations`."""

    def __init__(self, region: Region, store: Store) -> None:
        """Know nothing yet; `load` reads the records."""
        self.index = RegionIndex()
        self.allocations = Allocations(store, self.index, region.broker, self.refresh)
        self.directory = TaskDirectory()
        self._kinds = Kinds()
        self._broker, self._portal = region.broker, region.portal
        self._jobs, self._fleet = region.jobs, region.fleet
        self._clock, self._settings = region.clock, region.settings
        self._by_entitlement: dict[str, set[str]] = defaultdict(set)
        self._quotas: dict[str, Quota] | None = None
        self.waiting = Waiting(self._priority, lambda: self.index.gain)
        self._special: dict[str, str] = {}
        """Machine that is lent, or has a planned event that has not ended → its pool."""
        self._special_of: dict[str, set[str]] = defaultdict(set)
        self._timed: set[str] = set()
        """Machines whose agents are yet to answer for the first time."""
        self._quarantined: dict[str, float] = {}
        """Machine → until when it is kept from a profile that it did not reach."""
        self._promises = PromiseKeeper(self.index, self._all_quotas, self._aside)
        self._loaded = False
        region.jobs.listen(self._job_changed)
        region.portal.table.listen(lambda *_: self._quotas_changed())
        region.broker.listen(self._machine_changed, loaded=ignore)
        region.fleet.listen(self._machine_seen)

    async def load(self) -> None:
        """Finish what a crash interrupted, then read all allocations (restart in seconds).

        The tables must be loaded. A job of an earlier release has its tasks placed, but no
        allocation: its claims are taken from its record.
        """
        await self.allocations.recover()
        await self._look_at_all()
        await self.allocations.load()
        for record in self._jobs.records():
            self._adopt(record)
        self._loaded = True

    async def run(self) -> None:
        """Make up for events that were missed, until cancelled; a large region takes minutes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._promises.run())
            while True:
                await asyncio.sleep(self._settings.resync_s)
                await self.resync(_RESYNC_PAUSE_S)

    async def resync(self, pause_s: float = 0.0) -> None:
        """Compare the whole index with the brokers, whatever was heard or missed (AL2)."""
        await self._look_at_all(pause_s)
        known = list(self.index.machines)
        for start in range(0, len(known), STEP):
            part = known[start : start + STEP]
            self.refresh(name for name in part if self._broker.table.find(name) is None)
            await asyncio.sleep(pause_s)

    async def _look_at_all(self, pause_s: float = 0.0) -> None:
        for broker in list(self._broker.by_datacenter.values()):
            names = list(broker.table)
            for start in range(0, len(names), STEP):
                self.refresh(names[start : start + STEP])
                await asyncio.sleep(pause_s)

    def refresh(self, machines: Iterable[str]) -> None:
        """Bring some machines up to date with their brokers' records and agents."""
        known = []
        for name in machines:
            record = self._broker.table.find(name)
            if record is None:
                self.index.remove(name)
            else:
                known.append(self._as_indexed(record))
        self.index.put_many(known)

    def _adopt(self, record: JobRecord) -> None:
        claims = self.index.claims.get(record.name)
        entitlement = self.entitlement_of(record)
        missing = []
        for task in record.tasks:
            if task.placement is None or (claims and claims.get(task.index)):
                continue
            machine = self.index.machines.get(task.placement.machine)
            if machine is not None:
                demand = demand_for(spec_of(record, task), entitlement)
                missing.append(Claim(task.index, machine, demand, task.placement.ports or None))
        if missing:
            self.index.restore(record.name, self.pool_of(record), missing)

    # -- tasks to machines

    async def place(self, record: JobRecord, view: View) -> Placed:
        """Return machines for all tasks that need one and can have one; durable already."""
        if not record.tasks and record.name not in self.index.claims:
            return Placed()
        self._follow(record, view)
        entitlement = self.entitlement_of(record)
        pool = self.pool_of(record)
        claims = self.index.claims.get(record.name)
        request = request_of(record, view, pool, entitlement, claims)
        profile = self._profile(pool)
        if self.waiting.begin(record.name):
            self.allocations.forget_answer(record.name)
        allocation = await self.allocations.allocate(
            request, lambda: self._allowance(pool, request), profile
        )
        if allocation.unplaced:
            self.waiting.put(record.name, request, allocation.gain)
        else:
            self.waiting.drop(record.name)
        answer = Answer(allocation.claims, allocation.unplaced, allocation.reasons)
        return answer_of(record, view, answer)

    def _follow(self, record: JobRecord, view: View) -> None:
        """Let claims follow tasks that are back where they were, after all.

        Their move was allocated, but the job's record was not written; then the machine that
        they were to leave came back.
        """
        claims = self.index.claims.get(record.name)
        moving = {task.index for task in to_place(record, view)}
        stale, true = [], []
        for task in record.tasks if claims is not None else ():
            if task.placement is None or task.index in moving or claims is None:
                continue
            claimed = claims.machines[task.index] if task.index < len(claims.machines) else None
            if claimed is None or claimed.name == task.placement.machine:
                continue
            claim, machine = claims.get(task.index), self.index.machines.get(task.placement.machine)
            if claim is not None and machine is not None and machine.pool == claims.pool:
                stale.append(claim)
                true.append(Claim(task.index, machine, claim.demand, task.placement.ports or None))
        if stale and claims is not None:
            self.index.settle(Change(record.name, claims.pool, freed=stale))
            self.index.restore(record.name, claims.pool, true)
            self.allocations.forget_answer(record.name)

    async def forget(self, job: str) -> None:
        """Give back everything that a job claims."""
        self.waiting.drop(job)
        claims = self.index.claims.get(job)
        if claims is not None:
            await self.allocations.allocate(Request(job, claims.pool), Allowance)

    def target(self, record: JobRecord, task: TaskRecord, *, must_move: bool) -> Target:
        """Return where the newest version of a task would go; changes nothing."""
        entitlement = self.entitlement_of(record)
        pool = self.pool_of(record)
        demand = demand_for(record.spec, entitlement)
        claims = self.index.claims.get(record.name)
        known = claims.get(task.index) if claims is not None else None
        if known is not None and not must_move and same_claim(known.demand, demand):
            return Target(known.machine.name)
        others: dict[Demand, list[int]] = defaultdict(list)
        for claim in claims or ():
            if claim.task != task.index:
                others[claim.demand].append(claim.task)
        groups = [Group(d, tuple(tasks)) for d, tasks in others.items()]
        leave = known.machine.name if known is not None and must_move else ""
        groups.append(Group(demand, (task.index,), leave=leave, running=False))
        request = Request(
            record.name, pool, tuple(groups), preferences_of(record.spec, entitlement)
        )
        made = plan(self.index, request, self._allowance(pool, request))
        for claim in made.change.claims:
            if claim.task == task.index:
                taken = claim.machine in made.change.takes
                return Target(claim.machine.name, is_taken=taken)
        return Target("", reasons=made.reasons)

    async def plan_final(
        self, record: JobRecord
    ) -> tuple[Change, tuple[int, ...], tuple[str, ...]]:
        """Return what a job will have changed once it is as its record wants it.

        That is the change, the tasks without a machine, and why. Changes nothing, and lets
        others run meanwhile.
        """
        entitlement, pool = self.entitlement_of(record), self.pool_of(record)
        tasks = tuple(range(wanted_tasks(record)))
        groups = (Group(demand_for(record.spec, entitlement), tasks, running=False),)
        preferences = preferences_of(record.spec, entitlement)
        gang = record.spec.admission is Admission.GANG
        request = Request(record.name, pool, groups, preferences, gang)
        steps = planning(self.index, request, self._allowance(pool, request))
        made = await self.allocations.in_steps(steps)
        return made.change, made.unplaced, made.reasons

    def allowance(self, record: JobRecord) -> Allowance:
        """Return what the pool of a job may take from the free pool."""
        pool = self.pool_of(record)
        return self._allowance(pool, Request(record.name, pool))

    def strays(self, machine: str) -> list[str]:
        """Return tasks of ours that run on a machine although no record places them there."""
        known = self.directory.tasks(machine).keys()
        return [stop.task for stop in strays(machine, self._fleet.sight(machine).tasks, known)]

    def jobs_of(self, entitlement: str) -> list[str]:
        """Return the jobs bound to an entitlement."""
        return sorted(self._by_entitlement[entitlement])

    # -- quotas

    def quota(self, pool: str) -> Quota:
        """Return what a pool may hold, its reservations included."""
        return self._all_quotas().get(pool) or Quota(machines=0)

    def _all_quotas(self) -> Mapping[str, Quota]:
        if self._quotas is None:
            self._quotas = pool_quotas(self._portal.specs())
        return self._quotas

    def over_quota(self, pool: str) -> bool:
        """Return whether a pool holds more than its quota, since that was made smaller."""
        quota, (size, rru, per_type) = self.quota(pool), self._held(pool)
        return (
            (quota.machines is not None and size > quota.machines)
            or (quota.rru is not None and rru > quota.rru + 1e-6)
            or any(
                count > quota.per_type.get(kind, 0)
                for kind, count in per_type.items()
                if quota.per_type
            )
        )

    def _held(self, pool: str) -> tuple[int, float, Counter[str]]:
        """Return the machines that count against a pool's quota, their RRU, and by type.

        Those that tasks must leave do not: their successors may come before they are empty.
        Nor do those that are lent to it: nobody was promised them (EL4).
        """
        held = self.index.pool(pool)
        size, rru, per_type = held.size, held.rru, Counter(held.per_type)
        for machine in self._aside(pool):
            size -= 1
            rru -= machine.capacity.rru
            per_type[machine.capacity.machine_type] -= 1
        return size, rru, per_type

    def _aside(self, pool: str) -> Iterator[Machine]:
        for machine, record in self._special_in(pool):
            if record.loan is not None or leaving(record, self._clock()):
                yield machine

    def going(self, pool: str) -> list[Machine]:
        """Return the machines of a pool that its tasks must leave now."""
        now = self._clock()
        return [machine for machine, record in self._special_in(pool) if leaving(record, now)]

    def _special_in(self, pool: str) -> Iterator[tuple[Machine, MachineRecord]]:
        for name in self._special_of.get(pool, ()):
            machine, record = self.index.machines.get(name), self._broker.table.find(name)
            if machine is not None and record is not None and machine.pool == pool:
                yield machine, record

    async def look_at_clock(self) -> None:
        """Take in what time alone has changed about machines."""
        timed, self._timed = self._timed, set()
        names = [*timed, *self._special]
        for start in range(0, len(names), STEP):
            self.refresh(names[start : start + STEP])
            await asyncio.sleep(0)
        now = self._clock()
        over = [name for name, until in self._quarantined.items() if until <= now]
        for name in over:
            del self._quarantined[name]
        if over:
            self.index.loosened()

    def may_hold(self, pool: str, machine: Machine) -> bool:
        """Return whether a pool may hold such a machine at all."""
        return self.quota(pool).allows(machine.capacity.machine_type, machine.place.datacenter)

    def _allowance(self, pool: str, request: Request) -> Allowance:
        """Return what the pool may still take, for one plan."""
        quota, (size, rru, held) = self.quota(pool), self._held(pool)
        per_type = {k: n - held[k] for k, n in quota.per_type.items()}
        return Allowance(
            machines=None if quota.machines is None else quota.machines - size,
            rru=None if quota.rru is None else quota.rru - rru,
            per_type=per_type or None,
            types=quota.types,
            datacenter=quota.datacenter,
            refuses=self._refuses(pool, request),
            unpromised=self._unpromised(pool),
        )

    def _unpromised(self, pool: str) -> Limits | None:
        """Return how many free machines of which kind others were not promised."""
        if self._portal.settings.overgrant is Overgrant.ALLOW:
            return None  # whoever comes first gets machines
        return self._promises.limits(pool)

    def _refuses(self, pool: str, request: Request) -> Callable[[Machine], str]:
        """Return the judge of single free machines: quarantines, and who comes first."""
        profile = self._profile(pool)
        before = [
            wish
            for wish in self.waiting.ahead_of(self._priority(pool))
            if wish.pool != pool and self._may_grow(wish.pool)
        ]

        def refuses(machine: Machine) -> str:
            record = self._broker.table.find(machine.name)
            if record is None:
                return "is not known any more"
            if record.quarantined_profile == profile and record.quarantined_until > self._clock():
                return f"cannot reach profile {profile}: {record.quarantine_reason}"
            for wish in before:
                fits = not judge(wish.demand, machine, machine)
                if fits and self.may_hold(wish.pool, machine):
                    self.waiting.stands_behind(request.job)
                    return f"kept for entitlement {wish.pool}, which has a higher priority"
            return ""

        return refuses

    def _may_grow(self, pool: str) -> bool:
        quota = self.quota(pool)
        return quota.machines is None or self._held(pool)[0] < quota.machines

    def _quotas_changed(self) -> None:
        self._quotas = None
        self.waiting.reorder()
        self.index.loosened()

    def entitlement_of(self, record: JobRecord) -> EntitlementSpec | None:
        """Return the specification of a job's entitlement."""
        found = self._portal.table.find(record.spec.entitlement)
        return found.spec if found is not None else None

    def pool_of(self, record: JobRecord) -> str:
        """Return the entitlement on whose machines a job's tasks run."""
        spec = self.entitlement_of(record)
        name = record.spec.entitlement
        return pool_of(name, spec) if spec is not None else name

    def _profile(self, pool: str) -> str:
        found = self._portal.table.find(pool)
        return found.spec.host_profile if found is not None else ""

    def _priority(self, pool: str) -> int:
        found = self._portal.table.find(pool)
        return found.spec.priority if found is not None else 0

    # -- keeping the index true

    def _as_indexed(self, record: MachineRecord) -> IndexedMachine:
        """Return what the index is told about a machine, and note what else matters of it."""
        self._note_special(record)
        if record.quarantined_until > self._clock():
            self._quarantined[record.machine] = record.quarantined_until
        capacity, place = self._kinds.capacity(record), self._kinds.place(record)
        blocked = self._blocked(record)
        return record.machine, capacity, place, record.entitlement, blocked

    def _note_special(self, record: MachineRecord) -> None:
        events = record.unavailability
        planned = bool(events) and any(e.end is None and e.kind in MOVING for e in events)
        known = self._special.pop(record.machine, None)
        if known is not None:
            self._special_of[known].discard(record.machine)
        special = planned or record.loan is not None
        if special or known is not None:
            self._promises.outdated()
        if special:
            self._special[record.machine] = record.entitlement
            self._special_of[record.entitlement].add(record.machine)

    def _blocked(self, record: MachineRecord) -> str:
        """Return why a machine takes no tasks, as a predicate.

        One that still switches its profile takes them: they wait there for the proof.
        """
        if record.state is not MachineState.UP:
            return "is down"
        if record.hold is not None and not self.allocations.is_taking(record.machine):
            return f"is held for transaction {record.hold.transaction}"
        if record.unavailability and (planned := blocking(record, self._clock())):
            return planned
        sight = self._fleet.sight(record.machine)
        if not sight.answering and not self._is_yet_to_answer(record.machine, sight):
            return "does not answer"
        degraded = sight.profile.state is ProfileState.DEGRADED
        if record.entitlement and degraded and not self._fleet.ready(record):
            return f"failed to reach profile {record.profile_wanted!r}"
        if self.directory.leaving(record.machine) or (sight.tasks and self.strays(record.machine)):
            return "still runs tasks that moved away"
        return ""

    def _is_yet_to_answer(self, machine: str, sight: Sight) -> bool:
        """Return whether an agent was not heard only because we have just begun to ask.

        Otherwise the first agent to answer after a start would get all tasks.
        """
        if sight.heard_at is not None:
            return False
        asked_s = asyncio.get_running_loop().time() - sight.asked_since
        if asked_s < self._settings.down_after_s:
            self._timed.add(machine)
            return True
        return False

    def _machine_changed(
        self, name: str, _before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if after is None:
            self.index.remove(name)
        elif self._loaded:
            self.index.put(*self._as_indexed(after))

    def _machine_seen(self, name: str) -> None:
        record = self._broker.table.find(name)
        if record is not None and name in self.index.machines:
            self.index.block(name, self._blocked(record))

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        changed = self.directory.settle(name, after)
        if before is not None:
            self._by_entitlement[before.spec.entitlement].discard(name)
        if after is not None:
            self._by_entitlement[after.spec.entitlement].add(name)
        for machine in changed:
            self._machine_seen(machine)
