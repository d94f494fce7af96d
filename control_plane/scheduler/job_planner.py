"""Plans changes of jobs without making them, and explains why tasks wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from agent.api.relaxations import exposure_of
from control_plane.allocator.core.claims import Change, Claim
from control_plane.allocator.core.demand import demand_for
from control_plane.allocator.core.feasibility import Tally, bin_of
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.request import Allowance
from control_plane.allocator.core.spread import unevenness
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.operations import WAITING, OperationState
from control_plane.api.plans import JobExplanation, JobPlan, PlannedTask, SpreadBin
from control_plane.broker.core.assignment import FREE
from control_plane.runtime.table import Table
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.decision import DecisionInput
from control_plane.scheduler.core.operations import is_being_removed
from control_plane.scheduler.core.rollout import is_quiet, wanted_tasks
from control_plane.scheduler.core.rollout_progress import postponed
from control_plane.scheduler.core.sizing import remaining_tasks
from control_plane.scheduler.core.volume_pinning import volume_notes
from control_plane.scheduler.job_control import JobControl
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.scheduler import Scheduler

_CHECKED = 50
"""Machines that are examined between two checkpoints."""


class JobPlanner:
    """Plans changes of jobs and explains waiting tasks; changes nothing."""

    def __init__(
        self,
        jobs: Table[JobRecord],
        placements: Placements,
        control: JobControl,
        scheduler: Scheduler,
    ) -> None:
        self._scheduler, self._runtime = scheduler, scheduler.runtime
        self._jobs = jobs
        self._placements = placements
        self._index = placements.index
        self._control = control

    async def plan(self, spec: JobSpec, writer: str = "") -> JobPlan:
        """Return the effects of applying a job; raises the errors that applying would raise.

        Without a writer it checks no writer's rights, and keeps a size that a writer owns.
        """
        known = self._jobs.find(spec.name)
        record = await self._control.apply(spec, dry_run=True, writer=writer)
        change, unplaced, reasons = await self._plan_final(record)
        claims = self._index.claims.get(spec.name)
        now = {c.task: c.machine for c in claims or ()}
        after = dict(now)
        for claim in change.freed:
            after.pop(claim.task, None)
        placed = []
        for claim in change.claims:
            after[claim.task] = claim.machine
            place, before = claim.machine.place, now.get(claim.task)
            if before is claim.machine:
                continue  # it claims another amount where it is
            placed.append(
                PlannedTask(
                    task=claim.task,
                    machine=claim.machine.name,
                    datacenter=place.datacenter,
                    msb=place.msb.rpartition("/")[2],
                    taken=claim.machine in change.takes,
                    moved_from=before.name if before else "",
                )
            )
        moved = {task.task for task in placed}
        return JobPlan(
            job=spec.name,
            wanted=record.spec.tasks,
            new_version=known is not None and known.version != record.version,
            staying=sum(1 for task in after if task not in moved),
            placed=sorted(placed, key=lambda task: task.task),
            stopped=sorted(claim.task for claim in change.freed if claim.task not in after),
            taken=sorted(machine.name for machine in change.takes),
            unplaced=list(unplaced),
            reasons=list(reasons),
            spread=_spread(after.values()),
            **_exposure(spec),
        )

    async def explain(self, name: str) -> JobExplanation:
        """Return how many tasks of a job have a machine, and all reasons why others wait."""
        record = self._jobs.get(name)
        wanted, claims = wanted_tasks(record), self._index.claims.get(name)
        copied = claims.copy() if claims is not None else ()  # a thread reads it, perhaps
        waiting, spread = await self._runtime.compute(len(record.tasks), _places, record, copied)
        _, _, planned = await self._plan_final(record)
        held, free, refused_by_quota = await self._tally_all(record)
        limits = [r for r in planned if _is_limit(r)]
        of_free = [_of_free(r) for r in (*free.reasons(), *free.overlap())]
        reasons = [*held.reasons(), *held.overlap(), *of_free, *refused_by_quota]
        reasons += [r for r in limits if r not in reasons]
        if not waiting:
            reasons = []
        uneven = await self._uneven(record)
        volumes = await self._runtime.compute(
            len(record.tasks), volume_notes, record, self._jobs.find
        )
        await self._runtime.checkpoint(answers=True)
        return JobExplanation(
            job=name,
            wanted=wanted,
            placed=wanted - len(waiting),
            waiting=waiting,
            summary=_summary(wanted, waiting, reasons),
            reasons=reasons,
            fitting_held=held.fitting,
            fitting_free=free.fitting,
            spread=spread,
            uneven=uneven,
            second_copies=self._scheduler.second_copies(record),
            update=self._update_note(record, has_waiting=bool(waiting)),
            controller=self._scheduler.approvals.note(name),
            operations=_waiting(record, self._runtime.date()),
            volumes=volumes,
            image=await self._image_note(record),
            **_exposure(record.spec),
        )

    async def _plan_final(
        self, record: JobRecord
    ) -> tuple[Change, tuple[int, ...], tuple[str, ...]]:
        """Return what will change, the tasks without a machine, and why; see `plan_final`."""
        claims, over = self._index.claims.get(record.name), self._placements.even_spread(record)
        copied = claims.copy() if claims is not None else ()  # a thread reads it, perhaps
        inputs = DecisionInput({}, Moment(0.0, 0.0), claims=copied, even_spread=over)
        tasks = await self._runtime.compute(len(record.tasks), remaining_tasks, record, inputs)
        return await self._placements.plan_final(record, tasks)

    def _update_note(self, record: JobRecord, *, has_waiting: bool) -> str:
        """Describe the progress of a job's update, and what postpones it or has no room."""
        words = postponed(record)
        if not words and not has_waiting:  # else the reasons contain it
            words = self._scheduler.detail(record.name)
        return "; ".join(dict.fromkeys(filter(None, (self._scheduler.update_note(record), words))))

    async def _image_note(self, record: JobRecord) -> str:
        """Return why no task can be started from the job's image now; empty: they can."""
        why = await self._control.distrust(record.spec)
        return why and f"no task is started, and running tasks stay: {why}"

    async def _uneven(self, record: JobRecord) -> str:
        """Describe where a job has too many tasks, and why they stay; empty: its spread is even."""
        over, claims = self._placements.even_spread(record), self._index.claims.get(record.name)
        if over is None or claims is None:
            return ""
        pool = self._index.pool(self._placements.pool_of(record))
        repairs = await self._placements.repairs(record, {})
        bins = set[str]()
        for number, machine in enumerate(list(pool.machines())):
            if number % _CHECKED == 0:
                await self._runtime.checkpoint(answers=True)
            bins.add(bin_of(over.property, machine))
        bins |= {repair.to_bin for repair in repairs}  # such a bin may have only free machines
        await self._runtime.checkpoint(answers=True)
        copied = claims.copy()  # a thread reads it
        found = await self._runtime.offload(unevenness, copied, over, sorted(bins))
        if found is None:
            return ""
        if not await self._runtime.compute(len(record.tasks), is_quiet, record):
            why = "tasks move after the other operations of the job"
        elif repairs:
            why = "tasks move soon"
        else:
            why = "no machine there has room that the job may use"
        return (
            f"{found.fullest} has {found.most} tasks and {found.emptiest} has {found.fewest}: {why}"
        )

    async def _tally_all(self, record: JobRecord) -> tuple[Tally, Tally, list[str]]:
        """Judge every machine that the job could ever get, letting others run meanwhile."""
        pool = self._placements.pool_of(record)
        demand = demand_for(record.spec, self._placements.entitlement_of(record))
        allowance: Allowance = self._placements.allowance(record)
        held, free = Tally(demand), Tally(demand)
        refused_by_quota: Counter[str] = Counter()
        for number, machine in enumerate(list(self._index.pool(pool).machines())):
            if number % _CHECKED == 0:
                await self._runtime.checkpoint(answers=True)
            held.add(machine, machine, self._index.why_short(machine))
        for number, machine in enumerate(list(self._index.pool(FREE).machines())):
            if number % _CHECKED == 0:
                await self._runtime.checkpoint(answers=True)
            why = allowance.lacks(machine) or (allowance.refuses and allowance.refuses(machine))
            if why:
                refused_by_quota[why] += 1
            else:
                free.add(machine, machine, self._index.why_short(machine))
        words = [
            f"{n} free machine{'s' if n > 1 else ''}: {why}"
            for why, n in refused_by_quota.most_common()
        ]
        return held, free, words


def _places(record: JobRecord, claims: Iterable[Claim]) -> tuple[list[int], list[SpreadBin]]:
    """Return the tasks of a job that wait for a machine, and where the others are."""
    staying = [
        task
        for task in record.tasks
        if not (record.stopping or is_being_removed(task) or task.extra)
    ]
    indexes = {task.index for task in staying}
    waiting = [t.index for t in staying if t.placement is None or t.phase == "lost"]
    return waiting, _spread(claim.machine for claim in claims if claim.task in indexes)


def _waiting(record: JobRecord, now: float) -> list[str]:
    """Describe the waiting operations: task, reason, and waiting time."""
    controller = record.spec.controller
    found = []
    for task in record.tasks:
        operation = task.operation
        if operation is None or operation.state not in WAITING:
            continue
        if operation.state is OperationState.OFFERED and controller is not None:
            waits_for = f"for its controller {controller.name}"
        elif operation.state is OperationState.ACKNOWLEDGED:
            by = f" (approved by {operation.approved})" if operation.approved else ""
            waits_for = f"for its turn{by}"
        else:
            waits_for = "for a place, its image or its turn"
        until = ""
        if operation.deadline is not None:
            until = f", at the latest in {max(0.0, operation.deadline - now):.0f} s"
        found.append(
            f"task {task.index}: {operation.kind} because of {operation.cause} waits {waits_for}"
            f" for {max(0.0, now - operation.since):.0f} s{until}"
        )
    return found


def _is_limit(reason: str) -> bool:
    """Return whether a reason is a limit of the job or the region, not of the machines."""
    return " would get " in reason or "machine" not in reason.partition(":")[0]


def _of_free(reason: str) -> str:
    return reason.replace(" machine", " free machine", 1)


def _summary(wanted: int, waiting: list[int], reasons: list[str]) -> str:
    placed = f"{wanted - len(waiting)} of {wanted} placed"
    if not waiting:
        return placed
    word = "waits" if len(waiting) == 1 else "wait"
    return f"{placed}; {len(waiting)} {word}: {', '.join(reasons) or 'room was found just now'}"


def _spread(machines: Iterable[Machine]) -> list[SpreadBin]:
    counts = Counter((m.place.datacenter, m.place.msb.rpartition("/")[2]) for m in machines)
    return [SpreadBin(datacenter=d, msb=m, tasks=n) for (d, m), n in sorted(counts.items())]


class _Exposure(TypedDict):
    relaxations: list[str]
    exposure: float
    exposure_default: float


def _exposure(spec: JobSpec) -> _Exposure:
    """Return the relaxations and the exposure of a job's tasks."""
    return _Exposure(
        relaxations=sorted({*spec.relaxations}),
        exposure=exposure_of(spec.relaxations),
        exposure_default=exposure_of(()),
    )
