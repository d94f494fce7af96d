"""One job under a load, as the front end shows it. Tasks start slowly and use CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from agent.api import Health, Limits, Location
from agent.usage import TaskUsage
from control_plane.api.autoscale import Autoscale
from control_plane.api.intent_changes import SizeChange, SizesWritten
from control_plane.api.intents import Dimension, StoredIntent
from control_plane.api.inventory import MachineScope
from control_plane.api.jobs import (
    JobBrief,
    JobBriefs,
    JobPhase,
    JobRecord,
    JobSpec,
    JobStatus,
    Placement,
    TaskPhase,
    TaskRecord,
)
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.tasks import TaskDescription
from wire.errors import Conflict, NotFound, Problem, Unreachable

CORES = 2.0
BYTES_PER_CPU_S = 1_000_000
START_S = 200.0
MSBS = 4


class ModelRegion:
    """The front end of a region with the job `web`, on the clock of the running loop."""

    def __init__(
        self, policy: Autoscale | None, tasks: int, load: Callable[[float], float]
    ) -> None:
        spec = JobSpec(
            name="web",
            entitlement="front",
            tasks=tasks,
            image="sha256:" + "a" * 64,
            command=["/bin/serve"],
            limits=Limits(cpu_max_cores=CORES),
            autoscale=policy,
        )
        self.load = load
        """The load in cores at a time of the loop."""
        self.record = JobRecord(name="web", spec=spec, version=1)
        self.started = dict.fromkeys(range(tasks), -1e9)
        self.room = 10_000
        """The most tasks that can get a machine."""
        self.failing = ""
        self.silent = False
        """Whether agents give no answer."""
        self.sizes: list[tuple[float, int]] = []
        """Each resize, with its time."""
        self.reads = 0
        """Number of listings of jobs. Each has a new revision, as if the store had changed."""
        self._cpu: dict[int, float] = {}
        self._used_until = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def healthy(self) -> list[int]:
        return [i for i, at in self.started.items() if self.now() - at >= START_S][: self.room]

    def _use(self) -> None:
        """Add the CPU time since the last call to the tasks that are healthy now."""
        tasks, now = self.healthy(), self.now()
        for index in tasks:
            used = min(CORES, self.load(now) / len(tasks)) * (now - self._used_until)
            self._cpu[index] = self._cpu.get(index, 0.0) + used
        self._used_until = now

    async def list_job_briefs(self) -> JobBriefs:
        status = await self.get_job("web")
        record, policy = status.record, status.record.spec.autoscale
        self.reads += 1
        brief = JobBrief(
            name="web",
            entitlement=record.spec.entitlement,
            tasks=record.spec.tasks,
            healthy=status.healthy,
            autoscale=None if policy is None or record.stopping else policy.mode,
            revision=self.reads,
        )
        return JobBriefs(jobs=[brief])

    async def get_job(self, _: str) -> JobStatus:
        self._use()
        if self.failing:
            raise Unreachable(self.failing)
        healthy = self.healthy()
        tasks = [
            TaskRecord(
                index=i,
                version=self.record.version,
                generation=1,
                phase=TaskPhase.RUNNING if i in healthy else TaskPhase.STARTING,
                health=Health.HEALTHY if i in healthy else Health.UNKNOWN,
                placement=Placement(machine=f"m{i % MSBS}"),
            )
            for i in self.started
        ]
        record = replace(self.record, tasks=tasks)
        status = JobStatus(
            record=record,
            phase=JobPhase.STABLE,
            wanted=record.spec.tasks,
            running=len(healthy),
            healthy=len(healthy),
            updated=len(tasks),
        )
        return status

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        assert scope == MachineScope(entitlement="front")
        views = [
            MachineView(
                record=MachineRecord(
                    machine=f"m{i}",
                    location=Location(region="r", datacenter="d", msb=f"b{i}", row="w", rack="k"),
                    machine_type="t",
                )
            )
            for i in range(MSBS)
        ]
        return Machines(machines=views)

    async def describe_task(self, job: str, index: int) -> TaskDescription:
        self._use()
        if self.silent:
            raise Unreachable("the agent does not answer")
        if index not in self.started:
            raise NotFound("it is gone")
        used = self._cpu.get(index, 0.0)
        usage = TaskUsage(
            task_id=f"web-{index}", cpu_s=used, network_bytes=round(used * BYTES_PER_CPU_S)
        )
        return TaskDescription(
            task=f"web-{index}", machine="m0", phase="running", version=1, usage=usage
        )

    async def put_sizes(self, sizes: dict[str, SizeChange]) -> SizesWritten:
        versions, refused = dict[str, int](), dict[str, Problem]()
        for job, change in sizes.items():
            try:
                versions[job] = self._resized(Dimension.SIZE, change)
            except Conflict as e:
                refused[job] = e.problem()
        return SizesWritten(versions=versions, refused=refused)

    def _resized(self, dimension: Dimension, change: SizeChange) -> int:
        spec = self.record.spec
        known = self.record.intents.get(dimension, StoredIntent())
        if change.expect != known.version:
            raise Conflict(f"it is at version {known.version}")
        self._use()
        self.sizes.append((self.now(), change.tasks))
        size = replace(known, version=known.version + 1)
        spec = replace(spec, tasks=change.tasks)
        self.record = replace(self.record, spec=spec, intents={dimension: size})
        for index in range(change.tasks):
            self.started.setdefault(index, self.now())
        for index in [i for i in self.started if i >= change.tasks]:
            del self.started[index]
        return size.version


class Killed(Exception):
    """The process was killed here."""
