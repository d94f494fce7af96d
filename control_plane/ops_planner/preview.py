"""Computes what a plan would do, before an operator applies it; changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from control_plane.agents.region import Region
from control_plane.allocator.core.claims import Change
from control_plane.allocator.core.demand import Demand, demand_for
from control_plane.allocator.core.machine_pools import Pool
from control_plane.allocator.core.planner import plan as planned
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.api.jobs import TaskRecord
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.maintenance import (
    JobPlaces,
    MaintenanceRequest,
    PlacesFound,
    PlacesRequest,
    Preview,
)
from control_plane.broker.core.capacity import micro
from control_plane.broker.core.unavailability import planned as announced
from control_plane.ops_planner.core.impact import (
    AffectedJob,
    impact_order,
    overlaps,
    warnings,
    within_budgets,
)
from control_plane.ops_planner.core.waves import (
    PlannedMachine,
    divide_into_waves,
    end_condition,
    is_sequential,
    waves_away_together,
)
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.ports import Places

_JOBS_SHOWN = 200
_NO_TASKS_PRIORITY = 1001
"""Priority of a machine without tasks: above all of `EntitlementSpec.priority`."""
_CHECKPOINT_EVERY = 500
"""Machines that are read between two checkpoints."""
_TOGETHER_MAX = 2000
"""Largest number of tasks that are planned as if all moved together: no other actor runs meanwhile.
With more tasks each job is planned as if it moved alone, and the preview notes that."""


AskPlaces = Callable[[PlacesRequest], Awaitable[PlacesFound]]


class Previewer:
    """Computes previews, and the places that tasks of a plan would find."""

    def __init__(
        self,
        region: Region,
        jobs: JobTable,
        allocator: Places,
        owner: Callable[[str], Places | None],
        counters: Counters,
    ) -> None:
        """`owner` returns the allocator of a pool; None: another process has it."""
        self._machines, self._observations = region.broker.table, region.observations
        self._runtime, self._counters = region.runtime, counters
        self._jobs, self._allocator, self._owner = jobs, allocator, owner
        self._announced: set[str] = set()
        """Machines with announced work."""
        self.ask_others: AskPlaces = _no_other_processes
        """Asks the other processes that place tasks; jobs without an answer are missing."""
        region.broker.listen(self._machine_changed)

    def _machine_changed(
        self, name: str, _: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        if after is not None and announced(after):
            self._announced.add(name)
        else:
            self._announced.discard(name)

    async def waves(self, names: Sequence[str], request: MaintenanceRequest) -> list[list[str]]:
        """Return the machines of each wave."""
        planned_machines = []
        for number, name in enumerate(names):
            if number % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                await self._runtime.checkpoint()
            record = self._machines.find(name)
            if record is not None:
                at = record.location
                place = (at.datacenter, at.msb, at.row, at.rack)
                planned_machines.append(PlannedMachine(name, place, self._priority(record)))
        return divide_into_waves(planned_machines, request)

    async def preview(
        self, name: str, request: MaintenanceRequest, waves: Sequence[Sequence[str]]
    ) -> Preview:
        """Return what a plan would do."""
        jobs, serving_on, down = await self._affected_jobs(waves)
        scope = frozenset(machine for wave in waves for machine in wave)
        leaves = not request.tasks_survive
        notes = list[str]()
        if leaves:
            for wave_numbers in waves_away_together(request, len(waves)):
                notes += await self._find_places(jobs, waves, wave_numbers)
        impacts = sorted(
            (job.impact(stay=request.tasks_survive) for job in jobs.values()), key=impact_order
        )
        wave_by_wave = is_sequential(request)
        first = waves[0] if wave_by_wave else [machine for wave in waves for machine in wave]
        at_once, held = within_budgets(first, serving_on, jobs)
        up = max(1, self._counters.machines[MachineState.UP])
        largest = max(map(len, waves)) if wave_by_wave else len(scope)
        if down:
            notes.append(f"{down} of these machines are down already")
        return Preview(
            name=name,
            machines=len(scope),
            waves=[len(wave) for wave in waves],
            ends=end_condition(request),
            tasks=sum(impact.there for impact in impacts),
            jobs=impacts[:_JOBS_SHOWN],
            more_jobs=max(0, len(impacts) - _JOBS_SHOWN),
            at_once=at_once,
            held=held,
            share=largest / up,
            conflicts=await self._conflicts(name, scope, jobs),
            warnings=warnings(
                impacts,
                largest / up if largest > 1 else 0.0,
                has_deadline=request.deadline_s is not None,
                tasks_survive=request.tasks_survive,
            ),
            notes=notes,
        )

    # -- affected jobs

    async def _affected_jobs(
        self, waves: Sequence[Sequence[str]]
    ) -> tuple[dict[str, AffectedJob], dict[str, dict[str, int]], int]:
        """Return the jobs there; machine → job → serving tasks; and how many machines are down."""
        jobs, serving_on = dict[str, AffectedJob](), dict[str, dict[str, int]]()
        checked = down = 0
        for number, wave in enumerate(waves):
            for machine in wave:
                checked += 1
                if checked % _CHECKPOINT_EVERY == 0:
                    await self._runtime.checkpoint()
                record = self._machines.find(machine)
                down += record is not None and record.state is not MachineState.UP
                for task, entry in self._allocator.directory.tasks(machine).items():
                    if entry.leaving:
                        continue
                    job = jobs.get(entry.job) or self._affected_job(entry.job, len(waves))
                    if job is None:
                        continue
                    jobs[entry.job] = job
                    index = int(task.rpartition("-")[2])
                    job.tasks_by_wave[number].add(index)
                    if index not in job.not_serving:
                        serving = serving_on.setdefault(machine, {})
                        serving[entry.job] = serving.get(entry.job, 0) + 1
        for job in jobs.values():  # `down` also counts tasks on other machines
            job.not_serving &= set().union(*job.tasks_by_wave)
        return jobs, serving_on, down

    def _affected_job(self, name: str, waves: int) -> AffectedJob | None:
        record = self._jobs.find(name)
        if record is None or record.stopping:
            return None
        is_seen = self._allocator_of(name) is not None
        down = {t.index for t in record.tasks if not (self._serves(t) if is_seen else t.listed)}
        controller = record.spec.controller
        return AffectedJob(
            job=name,
            entitlement=record.spec.entitlement,
            tasks=len(record.tasks),
            down=len(down),
            budget=record.spec.update.max_unavailable,
            controller=controller.name if controller is not None else "",
            tasks_by_wave=[set() for _ in range(waves)],
            not_serving=down,
        )

    def _serves(self, task: TaskRecord) -> bool:
        if task.placement is None:
            return False
        now = self._runtime.date()
        return available(task, self._observations.view({}, [task.placement.machine], now))

    def _priority(self, record: MachineRecord) -> int:
        """Return the highest priority of a machine's tasks; a machine without tasks goes last."""
        names = self._allocator.directory.jobs(record.machine)
        jobs = (self._jobs.find(name) for name in names)
        known = [self._allocator.entitlement_of(job.spec) for job in jobs if job is not None]
        return max((e.priority for e in known if e is not None), default=_NO_TASKS_PRIORITY)

    # -- where they would go

    async def _find_places(
        self, jobs: dict[str, AffectedJob], waves: Sequence[Sequence[str]], together: Sequence[int]
    ) -> list[str]:
        """Record for each job how many tasks of some waves have no place; return notes."""
        scope = frozenset(machine for number in together for machine in waves[number])
        leaving = {
            name: tuple(sorted(set().union(*(job.tasks_by_wave[number] for number in together))))
            for name, job in jobs.items()
        }
        # only the process that places the tasks of a job can plan for them
        elsewhere = {name: leaving.pop(name) for name in [*leaving] if not self._allocator_of(name)}
        unknown = await self._ask_others(jobs, elsewhere, scope)
        at_once = await self._find_own_places(jobs, leaving, scope)
        notes = []
        if unknown:
            notes.append(
                f"{len(unknown)} jobs are in shards of unavailable processes, {unknown[0]} for "
                "instance: other machines for their tasks were not searched"
            )
        if not at_once:
            moving = sum(map(len, leaving.values()))
            notes.append(
                f"{moving} tasks are too many to plan together: each job was planned alone"
            )
        return notes

    async def _ask_others(
        self,
        jobs: dict[str, AffectedJob],
        leaving: Mapping[str, tuple[int, ...]],
        scope: frozenset[str],
    ) -> list[str]:
        """Record what other processes answered for their jobs; return the jobs without an answer.

        Each process plans its own jobs together, as if the jobs of other processes stayed.
        """
        if not leaving:
            return []
        request = PlacesRequest(
            tasks={n: list(of) for n, of in leaving.items()}, leave=sorted(scope)
        )
        answered = (await self.ask_others(request)).jobs
        for name, places in answered.items():
            if name in jobs and places.unplaced > jobs[name].unplaced:
                jobs[name].unplaced, jobs[name].reasons = places.unplaced, list(places.reasons)
        return sorted(leaving.keys() - answered.keys())

    async def find_places(self, request: PlacesRequest) -> PlacesFound:
        """Return how many tasks of jobs of this process would have no place, and why."""
        jobs = {
            name: job for name in request.tasks if (job := self._affected_job(name, 0)) is not None
        }
        own = {
            name: tuple(request.tasks[name])
            for name in jobs
            if self._allocator_of(name) is not None
        }
        await self._find_own_places(jobs, own, frozenset(request.leave))
        places = {n: JobPlaces(unplaced=jobs[n].unplaced, reasons=jobs[n].reasons) for n in own}
        return PlacesFound(jobs=places)

    async def _find_own_places(
        self,
        jobs: dict[str, AffectedJob],
        leaving: Mapping[str, tuple[int, ...]],
        scope: frozenset[str],
    ) -> bool:
        """Record for each job how many tasks have no place; return whether all moved together.

        Places are reserved only during the search.
        """
        at_once = sum(map(len, leaving.values())) <= _TOGETHER_MAX
        reserved = list[Change]()
        try:
            for name in sorted(leaving, key=lambda name: (-len(leaving[name]), name)):
                change = self._find_place(jobs[name], leaving[name], scope)
                if not at_once:
                    await self._runtime.checkpoint()
                elif change is not None and not self._index_of(change).reserve(change):
                    reserved.append(change)
        finally:
            for change in reversed(reserved):
                self._index_of(change).rollback(change)
        await self._runtime.checkpoint()
        return at_once

    def _allocator_of(self, job: str) -> Places | None:
        """Return the allocator of a job; None: it is in another process."""
        record = self._jobs.find(job)
        if record is None:
            return self._allocator
        return self._owner(self._allocator.pool_of(record.spec))

    def _index_of(self, change: Change) -> RegionIndex:
        return (self._owner(change.pool) or self._allocator).index

    def _find_place(
        self, job: AffectedJob, tasks: tuple[int, ...], scope: frozenset[str]
    ) -> Change | None:
        """Record how many tasks of a job have no place; return the change of the others."""
        record, allocator = self._jobs.find(job.job), self._allocator_of(job.job)
        if record is None or allocator is None or not tasks:
            return None
        entitlement = allocator.entitlement_of(record.spec)
        claims = allocator.index.claims.get(job.job)
        staying: dict[tuple[Demand, str], list[int]] = defaultdict(list)
        for claim in claims or ():
            if claim.task not in set(tasks):
                staying[claim.demand, claim.machine.pool].append(claim.task)
        groups = [
            Group(demand, tuple(staying_tasks), elsewhere=pool)
            for (demand, pool), staying_tasks in staying.items()
        ]
        wanted = demand_for(record.spec, entitlement)
        groups.append(Group(wanted, tasks, leave=scope, running=False))
        request = Request(
            job.job,
            allocator.pool_of(record.spec),
            tuple(groups),
            preferences_of(record.spec, entitlement),
            record.spec.fit,
        )
        allowance = allocator.quotas.allowance(request)
        self._raise_allowance(allowance, allocator.index.pool(request.pool), scope)
        plan = planned(allocator.index, request, allowance)
        moved = {claim.task for claim in plan.change.claims}
        unplaced = sum(1 for task in tasks if task not in moved)
        if unplaced > job.unplaced:
            job.unplaced, job.reasons = unplaced, list(plan.reasons)
        is_reserved = claims is not None and claims.reserved is not None
        return None if is_reserved else plan.change

    def _raise_allowance(self, allowance: Allowance, pool: Pool, scope: frozenset[str]) -> None:
        """Raise a pool's allowance by those of its machines that the plan takes away."""
        for name in scope - self._announced:
            machine = self._allocator.index.machines.get(name)
            if machine is None or machine.pool != pool.name:
                continue
            kind = machine.capacity.machine_type
            if allowance.machines is not None:
                allowance.machines += 1
            if allowance.micro_rru is not None:
                allowance.micro_rru += micro(machine.capacity.rru)
            if allowance.per_type is not None:
                more = allowance.per_type.get(kind, 0) + 1
                allowance.per_type = {**allowance.per_type, kind: more}

    # -- what else is planned

    async def _conflicts(
        self, name: str, scope: frozenset[str], jobs: dict[str, AffectedJob]
    ) -> list[str]:
        """Describe other work that is announced for the same machines or jobs."""
        machines: dict[str, list[str]] = defaultdict(list)
        shared: dict[str, set[str]] = defaultdict(set)
        for number, machine in enumerate(sorted(self._announced | scope)):
            if number % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                await self._runtime.checkpoint()
            record = self._machines.find(machine)
            for event in announced(record) if record is not None else ():
                if event.plan == name and name:
                    continue
                work = (
                    f"plan {event.plan}" if event.plan else f"{event.kind.value} ({event.reason})"
                )
                if machine in scope:
                    machines[work].append(machine)
                else:
                    shared[work] |= self._allocator.directory.jobs(machine) & jobs.keys()
        return overlaps(machines, {work: sorted(names) for work, names in shared.items() if names})


async def _no_other_processes(_: PlacesRequest) -> PlacesFound:
    return PlacesFound()
