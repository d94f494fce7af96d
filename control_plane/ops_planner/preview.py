"""Plans as shown to operators: progress of one, and what one would do; changes nothing."""

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
    JobNow,
    by_stake,
    overlaps,
    warnings,
    within_budgets,
)
from control_plane.ops_planner.core.waves import (
    PlannedWave,
    divide,
    how_it_ends,
    is_one_by_one,
    leaving_together,
)
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.reconcile import available
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.ports import Places

_JOBS_SHOWN = 200
_NOTHING_THERE = 1001
"""Priority of a machine without tasks: above all (`EntitlementSpec.priority`)."""
_TURN = 500
"""Machines that are read between two checkpoints."""
_TOGETHER_MAX = 2000
"""Tasks that are planned as if all moved together: no other actor runs meanwhile.
With more, each job is judged as if it moved alone, and the preview notes it."""


AskPlaces = Callable[[PlacesRequest], Awaitable[PlacesFound]]


class Previewer:
    """Judges plans."""

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
        """Machines for which anything is planned."""
        self.ask_others: AskPlaces = _no_other_plans
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
            if number % _TURN == _TURN - 1:
                await self._runtime.checkpoint()
            record = self._machines.find(name)
            if record is not None:
                at = record.location
                place = (at.datacenter, at.msb, at.row, at.rack)
                planned_machines.append(PlannedWave(name, place, self._priority(record)))
        return divide(planned_machines, request)

    async def preview(
        self, name: str, request: MaintenanceRequest, waves: Sequence[Sequence[str]]
    ) -> Preview:
        """Return what a plan would do."""
        jobs, on, down = await self._affected(waves)
        scope = frozenset(machine for wave in waves for machine in wave)
        leaves = not request.tasks_survive
        notes = list[str]()
        if leaves:
            for wave_numbers in leaving_together(request, len(waves)):
                notes += await self._find_places(jobs, waves, wave_numbers)
        impacts = sorted(
            (job.impact(stay=request.tasks_survive) for job in jobs.values()), key=by_stake
        )
        wave_by_wave = is_one_by_one(request)
        first = waves[0] if wave_by_wave else [machine for wave in waves for machine in wave]
        at_once, held = within_budgets(first, on, jobs)
        up = max(1, self._counters.machines[MachineState.UP])
        largest = max(map(len, waves)) if wave_by_wave else len(scope)
        if down:
            notes.append(f"{down} of these machines are down already")
        return Preview(
            name=name,
            machines=len(scope),
            waves=[len(wave) for wave in waves],
            ends=how_it_ends(request),
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

    async def _affected(
        self, waves: Sequence[Sequence[str]]
    ) -> tuple[dict[str, JobNow], dict[str, dict[str, int]], int]:
        """Return the jobs there, machine → job → serving tasks, and how many machines are down."""
        jobs, on = dict[str, JobNow](), dict[str, dict[str, int]]()
        looked = down = 0
        for number, wave in enumerate(waves):
            for machine in wave:
                looked += 1
                if looked % _TURN == 0:
                    await self._runtime.checkpoint()
                record = self._machines.find(machine)
                down += record is not None and record.state is not MachineState.UP
                for task, entry in self._allocator.directory.tasks(machine).items():
                    if entry.leaving:
                        continue
                    job = jobs.get(entry.job) or self._job(entry.job, len(waves))
                    if job is None:
                        continue
                    jobs[entry.job] = job
                    index = int(task.rpartition("-")[2])
                    job.there[number].add(index)
                    if index not in job.down_there:
                        there = on.setdefault(machine, {})
                        there[entry.job] = there.get(entry.job, 0) + 1
        for job in jobs.values():  # `down` counts also those on no machine of the plan
            job.down_there &= set().union(*job.there)
        return jobs, on, down

    def _job(self, name: str, waves: int) -> JobNow | None:
        record = self._jobs.find(name)
        if record is None or record.stopping:
            return None
        is_seen = self._places_of(name) is not None
        down = {t.index for t in record.tasks if not (self._serves(t) if is_seen else t.listed)}
        controller = record.spec.controller
        return JobNow(
            job=name,
            entitlement=record.spec.entitlement,
            tasks=len(record.tasks),
            down=len(down),
            budget=record.spec.update.max_unavailable,
            controller=controller.name if controller is not None else "",
            there=[set() for _ in range(waves)],
            down_there=down,
        )

    def _serves(self, task: TaskRecord) -> bool:
        if task.placement is None:
            return False
        now = self._runtime.date()
        return available(task, self._observations.view({}, [task.placement.machine], now))

    def _priority(self, record: MachineRecord) -> int:
        """Return the highest priority of a machine's tasks; one without tasks goes last."""
        jobs = self._allocator.directory.jobs(record.machine)
        known = (self._jobs.find(job) for job in jobs)
        ours = [self._allocator.entitlement_of(job.spec) for job in known if job is not None]
        return max((e.priority for e in ours if e is not None), default=_NOTHING_THERE)

    # -- where they would go

    async def _find_places(
        self, jobs: dict[str, JobNow], waves: Sequence[Sequence[str]], together: Sequence[int]
    ) -> list[str]:
        """Note for each job how many tasks of some waves have no place; return what to say."""
        scope = frozenset(machine for number in together for machine in waves[number])
        leaving = {
            name: tuple(sorted(set().union(*(job.there[number] for number in together))))
            for name, job in jobs.items()
        }
        # only the process that places the tasks of a job can plan for them
        elsewhere = {name: leaving.pop(name) for name in [*leaving] if not self._places_of(name)}
        unknown = await self._ask_others(jobs, elsewhere, scope)
        at_once = await self._find_here(jobs, leaving, scope)
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
        self, jobs: dict[str, JobNow], leaving: Mapping[str, tuple[int, ...]], scope: frozenset[str]
    ) -> list[str]:
        """Note what other processes found for their jobs; return the jobs without an answer.

        Each process plans its own jobs together, as if the jobs of other processes stayed.
        """
        if not leaving:
            return []
        request = PlacesRequest(
            tasks={n: list(of) for n, of in leaving.items()}, leave=sorted(scope)
        )
        found = (await self.ask_others(request)).jobs
        for name, places in found.items():
            if name in jobs and places.unplaced > jobs[name].unplaced:
                jobs[name].unplaced, jobs[name].reasons = places.unplaced, list(places.reasons)
        return sorted(leaving.keys() - found.keys())

    async def find_places(self, request: PlacesRequest) -> PlacesFound:
        """Return how many tasks of jobs of this process would have no place, and why."""
        jobs = {name: job for name in request.tasks if (job := self._job(name, 0)) is not None}
        ours = {
            name: tuple(request.tasks[name]) for name in jobs if self._places_of(name) is not None
        }
        await self._find_here(jobs, ours, frozenset(request.leave))
        found = {n: JobPlaces(unplaced=jobs[n].unplaced, reasons=jobs[n].reasons) for n in ours}
        return PlacesFound(jobs=found)

    async def _find_here(
        self, jobs: dict[str, JobNow], leaving: Mapping[str, tuple[int, ...]], scope: frozenset[str]
    ) -> bool:
        """Note for each job how many tasks have no place; return whether all were planned at once.

        Nothing that is found stays reserved.
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

    def _places_of(self, job: str) -> Places | None:
        record = self._jobs.find(job)
        if record is None:
            return self._allocator
        return self._owner(self._allocator.pool_of(record.spec))

    def _index_of(self, change: Change) -> RegionIndex:
        return (self._owner(change.pool) or self._allocator).index

    def _find_place(
        self, job: JobNow, tasks: tuple[int, ...], scope: frozenset[str]
    ) -> Change | None:
        record, allocator = self._jobs.find(job.job), self._places_of(job.job)
        if record is None or allocator is None or not tasks:
            return None
        entitlement = allocator.entitlement_of(record.spec)
        claims = allocator.index.claims.get(job.job)
        staying: dict[tuple[Demand, str], list[int]] = defaultdict(list)
        groups = []
        for claim in claims or ():
            if claim.task not in set(tasks):
                staying[claim.demand, claim.machine.pool].append(claim.task)
        for (demand, pool), those in staying.items():
            groups.append(Group(demand, tuple(those), elsewhere=pool))
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
        self._make_room(allowance, allocator.index.pool(request.pool), scope)
        made = planned(allocator.index, request, allowance)
        moved = {claim.task for claim in made.change.claims}
        unplaced = sum(1 for task in tasks if task not in moved)
        if unplaced > job.unplaced:
            job.unplaced, job.reasons = unplaced, list(made.reasons)
        busy = claims is not None and claims.reserved is not None
        return None if busy else made.change

    def _make_room(self, allowance: Allowance, pool: Pool, scope: frozenset[str]) -> None:
        """Raise a pool's allowance by the machines that it gives up."""
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
        self, name: str, scope: frozenset[str], jobs: dict[str, JobNow]
    ) -> list[str]:
        machines: dict[str, list[str]] = defaultdict(list)
        shared: dict[str, set[str]] = defaultdict(set)
        for number, machine in enumerate(sorted(self._announced | scope)):
            if number % _TURN == _TURN - 1:
                await self._runtime.checkpoint()
            record = self._machines.find(machine)
            for event in announced(record) if record is not None else ():
                if event.plan == name and name:
                    continue
                whose = (
                    f"plan {event.plan}" if event.plan else f"{event.kind.value} ({event.reason})"
                )
                if machine in scope:
                    machines[whose].append(machine)
                else:
                    there = self._allocator.directory.jobs(machine)
                    shared[whose] |= there & jobs.keys()
        return overlaps(machines, {plan: sorted(both) for plan, both in shared.items() if both})


async def _no_other_plans(_: PlacesRequest) -> PlacesFound:
    return PlacesFound()
