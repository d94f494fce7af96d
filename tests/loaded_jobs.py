"""Load on jobs of a simulated region, and the production autoscaler as a client.

The load of a job is spread evenly over its healthy copies, and uses CPU there. Each life of the
control plane has a new autoscaler; its store outlives both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent.api import Health
from agent.usage import TaskUsage
from control_plane.api.autoscale import Autoscale, LoadSignal
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import JobBriefs, JobStatus
from control_plane.api.machines import Machines
from control_plane.api.tasks import TaskDescription
from control_plane.autoscaler.service import Autoscaler
from control_plane.autoscaler.signals import LoadSource, TaskUsageSource
from control_plane.autoscaler.sizes import NewSize, size_change
from control_plane.broker.service import MachineQuery
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from vm_lab.region.machine import Copy, SimulatedMachine
from vm_lab.region.plane import PlaneLife
from wire.errors import TwineError, Unreachable

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

STEP_S = 30.0
"""Seconds between two updates of the used CPU time."""
EVERY_S = 120.0
"""Seconds between two evaluations of the autoscaler: half of the production value."""
Load = Callable[[float], float]
"""Returns the cores that a job needs at a virtual time."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The state of an autoscaled job at a time."""

    at: float
    load: float
    recommended: int
    """Tasks that the load needs, before limits."""
    wanted: int
    serving: int
    """Healthy copies."""
    cpu: float
    """Share of their CPU limits that the serving copies use."""
    machines: int
    """Machines with a copy."""
    old: int
    """Copies that do not run the newest image yet."""


class LoadedJobs:
    """Loads of jobs, the usage of their copies, and the autoscaler."""

    def __init__(
        self, region: SimulatedRegion, policies: dict[str, Autoscale], loads: dict[str, Load]
    ) -> None:
        """Start with the region; `policies` become part of the job files."""
        self._region, self.policies, self._loads = region, policies, loads
        self._cpu_s: dict[tuple[str, int], float] = defaultdict(float)
        """Task and invocation → used CPU time."""
        self._store = MemoryStore()
        self.autoscaler: Autoscaler | None = None
        self.samples: list[LoadSample] = []
        self.resizes: list[tuple[float, str, int, int]] = []
        """Time, job, size before and after."""
        region.network.usage, region.policies = self.usage, policies
        region.plane.on_serving.append(self._begin)
        region.timeline.after(STEP_S, self._step)

    # -- load

    def serving(self, job: str) -> list[Copy]:
        """Return the copies of a job that serve."""
        copies = (c for m in self._region.machines.values() if m.on for c in m.copies.values())
        mine = (copy for copy in copies if copy.task_id.rpartition("-")[0] == job)
        return [copy for copy in mine if copy.alive and copy.health is Health.HEALTHY]

    def _step(self) -> None:
        now = self._region.timeline.now
        for job, load in self._loads.items():
            copies = self.serving(job)
            used = 0.0
            for copy in copies:
                most = copy.spec.limits.cpu_max_cores or 1.0
                cores = min(most, load(now) / len(copies))
                used += cores / most
                self._cpu_s[copy.task_id, copy.invocation] += cores * STEP_S
            cpu = used / len(copies) if copies else 0.0
            self._sample(job, load(now), copies, cpu)
            owner = self._region.applications.by_job.get(job)
            if owner is not None:
                owner.load = cpu
        self._region.timeline.after(STEP_S, self._step)

    def _sample(self, job: str, load: float, copies: Sequence[Copy], cpu: float) -> None:
        owned, scaler = self._region.clients.jobs.get(job), self.autoscaler
        if owned is None or owned.granted is None or scaler is None:
            return
        view = next((v for v in scaler.views().sizings if v.job == job), None)
        found = view.recommendation if view is not None else None
        machines = self._region.machines.values()
        holding = sum(1 for m in machines if any(c.alive for c in m.copies.values()))
        self.samples.append(
            LoadSample(
                at=self._region.timeline.now,
                load=load,
                recommended=found.wanted if found is not None else 0,
                wanted=owned.granted.tasks,
                serving=len(copies),
                cpu=cpu,
                machines=holding,
                old=sum(1 for c in copies if c.running_image != owned.granted.image),
            )
        )

    def usage(self, machine: SimulatedMachine) -> list[TaskUsage]:
        """Return what the tasks of a machine use."""
        return [
            TaskUsage(task_id=c.task_id, cpu_s=self._cpu_s[c.task_id, c.invocation])
            for c in machine.copies.values()
            if c.alive
        ]

    # -- the autoscaler

    def _begin(self, life: PlaneLife) -> None:
        life.loop.create_task(self._run(life))

    async def _run(self, life: PlaneLife) -> None:
        runtime = SteppedRuntime(self._region.plane.wall_time, life.number)
        front_end = _FrontEnd(self, life)
        usage = TaskUsageSource(runtime, front_end.describe_task)
        sources: dict[LoadSignal, LoadSource] = {LoadSignal.CPU: usage}
        if self._store.failure() == "" and life.number > 1:
            await self._store.__aexit__(None, None, None)
        async with self._store:
            self.autoscaler = Autoscaler(
                runtime, front_end, self._store, sources, front_end, EVERY_S
            )
            await self.autoscaler.run()

    async def resize(self, life: PlaneLife, size: NewSize) -> str:
        """Resize a job, and record the size as granted to its owner, which the checker reads."""
        record, tasks = size.status.record, size.tasks
        name, was = record.name, record.spec.tasks
        owned = self._region.clients.jobs[name]
        asked, granted = owned.requested, owned.granted
        if asked is None or granted is None or life.control_plane is None:
            return "the job stops"
        owned.requested = replace(asked, tasks=min(was, tasks))
        owned.largest_size = max(owned.largest_size, tasks)
        try:
            await life.control_plane.intents.size(name, size_change(size), "autoscaler")
        except TwineError as e:
            owned.requested = asked
            return str(e)
        self.resizes.append((self._region.timeline.now, name, was, tasks))
        self.observe(name, tasks)
        return ""

    def release(self, job: str, digest: str, tasks: int) -> None:
        """Apply the job file with a new image, and with the `tasks` of the owner's file."""
        asked = self._region.clients.jobs[job].requested
        if asked is not None:
            self._region.plane.images.add(digest)
            self._region.machine_context.known_images.add(digest)
            self._region.clients.apply_job(replace(asked, image=digest, tasks=tasks))

    def observe(self, job: str, tasks: int) -> None:
        """Record the current size of a job, also if the answer to its resize was lost."""
        owned = self._region.clients.jobs.get(job)
        if owned is None or owned.requested is None or owned.granted is None:
            return
        if (owned.requested.tasks, owned.granted.tasks) != (tasks, tasks):
            owned.requested = replace(owned.requested, tasks=tasks)
            owned.granted = replace(owned.granted, tasks=tasks)


@dataclass(frozen=True, slots=True)
class _FrontEnd:
    """The front end as the autoscaler calls it in one life of the control plane."""

    jobs: LoadedJobs
    life: PlaneLife

    async def list_job_briefs(self) -> JobBriefs:
        if self.life.control_plane is None:
            raise Unreachable("the control plane does not serve")
        found = await self.life.control_plane.intents.briefs()
        for brief in found.jobs:
            if brief.name in self.jobs.policies:
                self.jobs.observe(brief.name, brief.tasks)
        return found

    async def get_job(self, job: str) -> JobStatus:
        if self.life.control_plane is None:
            raise Unreachable("the control plane does not serve")
        return await self.life.control_plane.get_job(job)

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        if self.life.control_plane is None:
            raise Unreachable("the control plane does not serve")
        return await self.life.control_plane.inventory.page(
            MachineQuery(scope or MachineScope()), "", 10_000
        )

    async def describe_task(self, job: str, index: int) -> TaskDescription:
        if self.life.control_plane is None:
            raise Unreachable("the control plane does not serve")
        return await self.life.control_plane.task_service.describe(job, index)

    async def write(self, sizes: Sequence[NewSize]) -> dict[str, str]:
        found = {s.status.record.name: await self.jobs.resize(self.life, s) for s in sizes}
        return {job: why for job, why in found.items() if why}
