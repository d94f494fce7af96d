"""Assigns machines to entitlements, and tasks to machines.

Placements are planned on the index, reserved there at once, and become durable with the
job's record; that write is refused if a machine's record changed since the plan was made.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from agent.api import ProfileState
from agent.errors import Conflict, TwineError
from control_plane.api.capacity import EntitlementRecord
from control_plane.api.jobs import JobRecord, TaskRecord, task_id
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.core.capacity import CapacityPlan, Held, Need, plan_capacity
from control_plane.core.placement import Host, Plan, demand_of, place, usable_memory
from control_plane.core.reconcile import View, spec_of, strays
from control_plane.core.rollout import apply_plan, to_place, wanted_tasks
from control_plane.services.broker import FREE
from control_plane.services.region import Region
from control_plane.services.usage import UsageIndex

log = logging.getLogger(__name__)
_PAUSE_S = 0.02
"""After each look at the entitlements, so that a flood of news costs few looks."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job's record with new placements, and the machines it relies on."""

    record: JobRecord
    machines: tuple[str, ...] = ()


class Allocator:
    """Plans on `usage` and the broker's records; owns no records itself."""

    def __init__(
        self,
        region: Region,
    ) -> None:
        """Allocate nothing yet."""
        self.usage = UsageIndex()
        self.shortages: dict[str, tuple[str, ...]] = {}
        """Entitlement → why it could not get the machines its jobs need."""
        self._broker, self._portal = region.broker, region.portal
        self._jobs, self._fleet = region.jobs, region.fleet
        self._settings, self._clock = region.settings, region.clock
        self._wake = asyncio.Event()
        self._by_entitlement: dict[str, set[str]] = defaultdict(set)
        self._empty_since: dict[str, float] = {}
        region.jobs.listen(self._job_changed)
        region.portal.table.listen(lambda *_: self._wake.set())
        region.broker.listen(lambda *_: self._wake.set())
        region.fleet.listen(lambda _: self._wake.set())

    # -- tasks to machines

    def place(self, record: JobRecord, view: View, now: float) -> Allocation:
        """Return the record with machines for all tasks that need one and can have one.

        While the entitlement is about to grow, tasks wait for it to be as wide as it will be.
        Nothing is awaited between plan and reservation, so no other job is given the room.
        """
        waiting = to_place(record, view)
        if not waiting or self._grows(record.spec.entitlement):
            return Allocation(record)
        alike: dict[tuple[int, str], list[TaskRecord]] = defaultdict(list)
        for task in waiting:
            alike[task.version, task.avoid].append(task)
        machines: set[str] = set()
        for tasks in alike.values():
            mine = _per_machine(record, {task.index for task in waiting})
            plan = self._place(record, tasks, mine)
            if not plan.placements and plan.unplaced:
                plan = Plan(unplaced=plan.unplaced, reasons=self._why(record, plan))
            record = apply_plan(record, plan, now)
            machines |= {p.machine for p in plan.placements.values()}
            self.usage.reserve(record.name, record)
        return Allocation(record, tuple(sorted(machines)))

    def _place(self, record: JobRecord, tasks: list[TaskRecord], mine: dict[str, int]) -> Plan:
        """Plan for tasks that are alike; the machine they avoid is better than none."""
        demand = demand_of(spec_of(record, tasks[0]))
        indexes, avoid = [task.index for task in tasks], tasks[0].avoid
        hosts = self._hosts(record.spec.entitlement, ready=False)
        if avoid:
            plan = place(demand, indexes, [host for host in hosts if host.name != avoid], mine)
            if not plan.unplaced:
                return plan
        return place(demand, indexes, hosts, mine)

    def target(self, record: JobRecord, task: TaskRecord) -> Plan:
        """Return where the newest version of a task would go if the task were gone."""
        without = frozenset({task_id(record.name, task.index)})
        hosts = self._hosts(record.spec.entitlement, ready=True, without=without)
        mine = _per_machine(record, {task.index})
        return place(demand_of(record.spec), [task.index], hosts, mine)

    def _hosts(
        self, entitlement: str, *, ready: bool, without: frozenset[str] = frozenset()
    ) -> list[Host]:
        """Return the machines of an entitlement with their load and what blocks them."""
        return [
            self._host(record, self._blocked(record, ready=ready), without)
            for record in self._broker.held(entitlement)
        ]

    def strays(self, machine: str) -> list[str]:
        """Return tasks of ours that run on a machine although no record places them there."""
        known = self.usage.tasks(machine).keys()
        return [stop.task for stop in strays(machine, self._fleet.sight(machine).tasks, known)]

    def jobs_of(self, entitlement: str) -> list[str]:
        """Return the jobs bound to an entitlement."""
        return sorted(self._by_entitlement[entitlement])

    def _why(self, record: JobRecord, plan: Plan) -> tuple[str, ...]:
        return plan.reasons + self.shortages.get(record.spec.entitlement, ())

    def _blocked(self, record: MachineRecord, *, ready: bool) -> str:
        """Return why a machine takes no tasks, as a predicate.

        Unless it must be `ready`, one that still switches its profile will do: the task
        waits there for the proof. Otherwise the first machine to be ready would get all.
        """
        if record.state is not MachineState.UP:
            return "is down"
        sight = self._fleet.sight(record.machine)
        if not sight.answering:
            return "does not answer"
        if sight.profile.state is ProfileState.DEGRADED and not self._fleet.ready(record):
            return f"failed to reach profile {record.profile_wanted!r}"
        if ready and not self._fleet.ready(record):
            return f"switches to profile {record.profile_wanted!r}"
        return self._dirty(record.machine)

    def _dirty(self, machine: str) -> str:
        if self.usage.leaving(machine) or self.strays(machine):
            return "still runs tasks that moved away"
        return ""

    def _host(
        self, record: MachineRecord, blocked: str, without: frozenset[str] = frozenset()
    ) -> Host:
        return Host(
            name=record.machine,
            location=record.location,
            machine_type=record.machine_type,
            memory_bytes=usable_memory(record.facts),
            cpu_cores=record.facts.cpus if record.facts else 0,
            load=self.usage.load(record.machine, without),
            blocked=blocked,
            next_port=self.usage.next_port(record.machine),
        )

    def _job_changed(self, name: str, before: JobRecord | None, after: JobRecord | None) -> None:
        self.usage.settle(name, after)
        if before is not None:
            self._by_entitlement[before.spec.entitlement].discard(name)
        if after is not None:
            self._by_entitlement[after.spec.entitlement].add(name)
        self._wake.set()

    # -- machines to entitlements

    async def run(self) -> None:
        """Grow and shrink entitlements until cancelled."""
        self._wake.set()
        while True:
            try:
                async with asyncio.timeout(min(self._settings.resync_s, 5.0)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            for record in self._portal.table.records():
                try:
                    await self.adjust(record)
                except Conflict:
                    self._wake.set()  # something changed under the plan: plan again
                except TwineError as e:
                    fields = {"entitlement": record.name, "reason": str(e)}
                    log.warning("allocation failed", extra=fields)
                except Exception:
                    log.exception("allocation failed", extra={"entitlement": record.name})
            await asyncio.sleep(_PAUSE_S)

    async def adjust(self, entitlement: EntitlementRecord) -> None:
        """Take the machines that an entitlement needs, give back those it does not."""
        name, spec = entitlement.name, entitlement.spec
        for record in self._broker.held(name):
            if record.profile_wanted != spec.host_profile:
                await self._release_unused(record)
        plan = self._plan(entitlement)
        shortage = (*plan.reasons, *self._unusable(entitlement)) if plan.reasons else ()
        if shortage != self.shortages.get(name, ()):
            self.shortages[name] = shortage
            if shortage:
                log.warning(
                    "entitlement lacks machines",
                    extra={"entitlement": name, "reason": "; ".join(shortage)},
                )
        for machine in plan.give_back:
            await self._broker.release(machine, revision=self._broker.table.revision(machine))
        for machine in plan.take:
            revision = self._broker.table.revision(machine)
            await self._broker.assign(machine, name, spec.host_profile, revision=revision)

    async def release_idle(self, entitlement: str) -> None:
        """Give back all machines of an entitlement on which nothing is placed."""
        for record in self._broker.held(entitlement):
            await self._release_unused(record)

    async def _release_unused(self, record: MachineRecord) -> None:
        if not self.usage.tasks(record.machine):
            revision = self._broker.table.revision(record.machine)
            await self._broker.release(record.machine, revision=revision)

    def _plan(self, entitlement: EntitlementRecord) -> CapacityPlan:
        held = [self._held(record) for record in self._broker.held(entitlement.name)]
        needs = [*self._needs(entitlement.name)]
        return plan_capacity(
            entitlement.spec.machines or 1_000_000, held, self._free(entitlement), needs
        )

    def _grows(self, entitlement: str) -> bool:
        record = self._portal.table.find(entitlement)
        if record is None or not self._plan(record).take:
            return False
        self._wake.set()
        return True

    def _held(self, record: MachineRecord) -> Held:
        """Describe a machine to `core.capacity`; one that is switching counts as usable."""
        placed = self.usage.tasks(record.machine)
        tasks = any(not p.leaving and not p.lost for p in placed.values())
        now = asyncio.get_running_loop().time()
        if tasks:
            self._empty_since.pop(record.machine, None)
        else:
            self._empty_since.setdefault(record.machine, now)
        since = self._empty_since.get(record.machine, now)
        blocked = "is down" if record.state is not MachineState.UP else ""
        return Held(
            host=self._host(record, blocked),
            empty=not tasks,
            idle=not tasks and now - since >= self._settings.give_back_after_s,
        )

    def _free(self, entitlement: EntitlementRecord) -> list[Host]:
        """Return the machines of the free pool that the entitlement may take."""
        records = self._broker.held(FREE)
        return [self._host(r, "") for r in records if not self._refusal(r, entitlement)]

    def _unusable(self, entitlement: EntitlementRecord) -> list[str]:
        """Return why machines of the free pool cannot be taken, with how many each time."""
        refusals = Counter(self._refusal(r, entitlement) for r in self._broker.held(FREE))
        refusals.pop("", None)
        return [f"{n} free machines: {why}" for why, n in sorted(refusals.items())]

    def _refusal(self, record: MachineRecord, entitlement: EntitlementRecord) -> str:
        """Return why an entitlement may not take a free machine now, empty if it may."""
        spec = entitlement.spec
        if spec.machine_types and record.machine_type not in spec.machine_types:
            return f"type {record.machine_type} is not among its types"
        if record.quarantined_profile == spec.host_profile:
            left_s = record.quarantined_until - self._clock()
            if left_s > 0:
                return f"cannot reach profile {spec.host_profile}: {record.quarantine_reason}"
        if record.state is not MachineState.UP:
            return "down"
        if not self._fleet.sight(record.machine).answering:
            return "the agent does not answer"
        return "still being cleaned" if self._dirty(record.machine) else ""

    def _needs(self, entitlement: str) -> Iterable[Need]:
        for name in self.jobs_of(entitlement):
            record = self._jobs.get(name)
            wanted = wanted_tasks(record)
            view = self._fleet.view(entitlement, ())
            waiting = {task.index for task in to_place(record, view)}
            missing = wanted - sum(1 for task in record.tasks if task.index < wanted)
            yield Need(
                job=name,
                demand=demand_of(record.spec),
                tasks=wanted,
                unplaced=len(waiting) + missing,
                mine=_per_machine(record, waiting),
            )


def _per_machine(record: JobRecord, without: set[int]) -> dict[str, int]:
    """Count a job's placed tasks per machine, some tasks left out."""
    return Counter(
        task.placement.machine
        for task in record.tasks
        if task.placement is not None and task.index not in without
    )
