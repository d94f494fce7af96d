"""Continuous delivery in a simulated region: the production conveyor as a client of it.

Each life of the control plane has a new conveyor; its store outlives both. While machines fail,
images of three kinds are released, a scaler writes sizes, and an operator holds jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from control_plane.api.intent_changes import HoldChange, SizeChange
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.job_control.core.intents import size_of
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from conveyor.api import PipelineSpec
from conveyor.core import evaluation
from conveyor.core.acts import DeliveryAct, SetFrozen
from conveyor.core.evaluation import Measurement
from conveyor.core.progress import progress
from conveyor.pipeline_file import pipeline_spec
from conveyor.push import push_change
from conveyor.records import DeliveryRecords
from conveyor.runs import GateOutcome, JobProgress, PipelineRecord, PipelineRun
from conveyor.service import DeliveryService
from vm_lab.region.plane import PlaneLife
from wire.errors import Busy, NotFound, TwineError

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

ACT_EVERY_S = 1.0
"""Seconds between two checks of the images that run."""
CANARIES = 1
MOVE_S = 30.0
"""Seconds that a task which moves may run on two machines."""
IMAGE_S, SIZE_S, HOLD_S = 240.0, 60.0, 400.0
"""Average seconds between two new images, new sizes and holds of a job."""
HELD_S = (20.0, 120.0)
"""Shortest and longest hold."""
CONVEYOR = "user:conveyor"


class DeliveredJobs:
    """Pipelines of the first jobs of a region, and all writers of these jobs."""

    def __init__(self, region: SimulatedRegion, count: int, *, is_random: bool = True) -> None:
        """Start with the region; without `is_random` only explicit calls write something."""
        self._region = region
        self._chance = random.Random(f"{region.scenario.name} {region.seed} deliveries")
        self.jobs = [f"job{number}" for number in range(count)]
        self.newest: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        """Images that must not pass the canary stage → their job."""
        self._image_count = 0
        self._pending_sizes: dict[str, tuple[int, int]] = {}
        """Job → life and size of a request for a size that has no answer."""
        self._store = MemoryStore()
        self._excess_since: dict[str, float] = {}
        self._records: dict[str, PipelineRecord] = {}
        self._is_random = is_random
        self.runs: dict[tuple[str, int], PipelineRun] = {}
        """Job and number → runs that ended."""
        self._figures = region.figures
        region.externally_written = frozenset(self.jobs)
        region.more_unsettled = self.unsettled
        region.plane.on_serving.append(self._begin)
        region.timeline.after(ACT_EVERY_S, self._act)

    # -- writers of the jobs

    def _act(self) -> None:
        region = self._region
        if self._is_random and region.story_at and region.timeline.now < region.faults_end:
            for job in self.jobs:
                self._draw_requests(job)
        for image, job in self.wrong.items():
            self._check_canary(image, job)
        region.timeline.after(ACT_EVERY_S, self._act)

    def _draw_requests(self, job: str) -> None:
        """Draw requests of a job's writers at random."""
        if self._chance.random() < ACT_EVERY_S / IMAGE_S:
            self.release(job, self._chance.choice(["good", "good", "good", "wrong", "ill"]))
        if self._chance.random() < ACT_EVERY_S / SIZE_S:
            fewest, most = self._region.scenario.work.tasks
            self._write_size(job, self._chance.randint(fewest, most))
        if self._chance.random() < ACT_EVERY_S / HOLD_S:
            hold = HoldChange(lasts_s=self._chance.uniform(*HELD_S), reason="an incident")
            self._send(lambda cp: cp.intents.hold(job, hold, "user:operator"))

    def _write_size(self, job: str, tasks: int) -> None:
        life = self._region.plane.life
        if life is None or self._region.plane.serving is None:
            return
        self._pending_sizes[job] = (life.number, tasks)
        request = SizeChange(tasks=tasks, reason="load")

        async def ask(cp: ControlPlane) -> None:
            await cp.intents.size(job, request, "user:scaler")
            self._pending_sizes.pop(job, None)

        self._allow_size(job, self._region.clients.jobs[job].requested, tasks)
        self._send(ask)

    def _allow_size(self, job: str, requested: JobSpec | None, tasks: int) -> None:
        """Allow a job to have only `tasks` tasks: a write of its size is under way."""
        if requested is not None:
            owned = self._region.clients.jobs[job]
            owned.requested = replace(requested, tasks=min(requested.tasks, tasks))

    def release(self, job: str, kind: str) -> str:
        """Make a new image of a job: `good`, `wrong` (its gate fails) or `ill` (never healthy)."""
        self._image_count += 1
        digest = (
            "sha256:" + hashlib.sha256(f"{job} {self._image_count} {kind}".encode()).hexdigest()
        )
        region = self._region
        region.plane.images.add(digest)
        region.machine_context.known_images.add(digest)
        if kind == "ill":
            region.machine_context.bad_images.add(digest)
        if kind != "good":
            self.wrong[digest] = job
        owned = region.clients.jobs[job]
        if owned.granted is not None:
            owned.all_requested = (*owned.all_requested, replace(owned.granted, image=digest))
        self.newest[job] = digest
        region.history.note(f"image {digest[7:11]} of {job} is {kind}")
        return digest

    def _send(self, call: Callable[[ControlPlane], Awaitable[object]]) -> None:
        life = self._region.plane.life
        serving = self._region.plane.serving
        if life is None or serving is None:
            return

        async def attempt() -> None:
            try:
                await call(serving)
            except TwineError as e:
                self._region.history.note(f"a writer is refused: {e.code}")

        life.loop.create_task(attempt())

    # -- rules

    def _check_canary(self, image: str, job: str) -> None:
        """Check that a wrong image runs on at most as many tasks as the canary stage has."""
        region = self._region
        tasks = {
            copy.task_id
            for name, machine in region.machines.items()
            if machine.on and region.checker.machines[name].responsive
            for copy in machine.copies.values()
            if copy.alive and copy.wanted and copy.running_image == image
        }
        if len(tasks) <= CANARIES:
            self._excess_since.pop(image, None)
            return
        since = self._excess_since.setdefault(image, region.timeline.now)
        if region.timeline.now - since > MOVE_S:
            text = f"{image[7:11]}, which is wrong, runs on {len(tasks)} tasks of {job}"
            region.checker.violate("canary", text, image)

    def unsettled(self) -> list[str]:
        """Return the pipelines that are not at rest; report those that ended with a wrong image."""
        reasons = []
        for job, record in self._records.items():
            run = record.active or record.waiting
            if run is not None:
                reasons.append(f"pipeline of {job}: {run.state} {run.waits}")
            elif record.good.get(job, "") in self.wrong:
                self._region.checker.violate("delivered", f"{job} finished with a wrong image", job)
        missing = [job for job in self.jobs if job not in self._records]
        return [*reasons, *(f"pipeline of {job} is not known" for job in missing)]

    def record_job(self, record: JobRecord) -> None:
        """Record a job's current image and size as granted: owners write neither here."""
        owned = self._region.clients.jobs[record.name]
        if owned.granted is None or owned.requested is None:
            return
        owned.granted = replace(owned.granted, image=record.spec.image, tasks=record.spec.tasks)
        self._allow_size(record.name, owned.granted, size_of(record).wanted)
        life, tasks = self._pending_sizes.get(record.name, (0, 0))
        if life == self._region.plane.lives:
            self._allow_size(record.name, owned.requested, tasks)
        owned.largest_size, owned.expected_image = (
            max(owned.largest_size, record.spec.tasks),
            record.spec.image,
        )

    # -- the conveyor

    def _begin(self, life: PlaneLife) -> None:
        life.loop.create_task(self._run(life))

    async def _run(self, life: PlaneLife) -> None:
        runtime = SteppedRuntime(self._region.plane.wall_time, life.number)
        if life.number > 1:
            await self._store.__aexit__(None, None, None)
        async with self._store:
            meter = _RegionMeter(self)
            service = DeliveryService(
                DeliveryRecords(self._store), _RegionPushes(self, life), runtime, meter
            )
            await service.load()
            for job in self.jobs:
                await service.apply(_pipeline(job), "owner")
            life.loop.create_task(self._follow(service, life))
            try:
                await service.run()
            except Busy:
                return  # the next life has opened the store

    async def _follow(self, service: DeliveryService, life: PlaneLife) -> None:
        """Read the pipelines and the jobs every two seconds, also while no run is under way."""
        while life.alive:
            for job in self.jobs:
                self._records[job] = (await service.view(job)).record
                for run in (await service.history(job, 5, None)).runs:
                    if run.ended is not None and (job, run.number) not in self.runs:
                        self.runs[job, run.number] = run
                        figure = f"runs {run.state}"
                        self._figures[figure] = self._figures.get(figure, 0) + 1
                serving = life.control_plane
                if serving is None:
                    return
                try:
                    self.record_job((await serving.get_job(job)).record)
                except TwineError:
                    continue
            await asyncio.sleep(2.0)


class _RegionPushes:
    """`PushWriter` over the control plane of one life."""

    def __init__(self, jobs: DeliveredJobs, life: PlaneLife) -> None:
        self._jobs, self._life = jobs, life

    async def read_progress(self, job: str, image: str) -> JobProgress:
        try:
            status = await self._life.serving().get_job(job)
        except NotFound:
            return JobProgress(job=job)
        self._jobs.record_job(status.record)
        return progress(status, image)

    async def newest_image(self, name: str) -> str:
        self._life.serving()
        return name if name.startswith("sha256:") else self._jobs.newest.get(name, "")

    async def write(self, act: DeliveryAct) -> None:
        if isinstance(act, SetFrozen):
            await self._life.serving().pause_job(act.job, paused=act.frozen)
        else:
            await self._life.serving().intents.push(act.job, push_change(act), CONVEYOR)


class _RegionMeter:
    """Measures gates: health from the job's status, errors from the kind of image."""

    def __init__(self, jobs: DeliveredJobs) -> None:
        self._jobs = jobs

    async def measure(
        self, name: str, run: PipelineRun, jobs: Sequence[JobProgress], now: float
    ) -> Measurement | None:
        del now
        gate = run.spec.gates[name]
        if gate.health is not None:
            return evaluation.evaluate_health(gate.health, jobs, run.steps[-1].restarts or 0)
        if not any(job.new_healthy for job in jobs):
            return evaluation.no_data("no new task answers")
        is_wrong = run.image in self._jobs.wrong
        outcome = GateOutcome.FAIL if is_wrong else GateOutcome.PASS
        return Measurement(
            outcome, "half of the answers are errors" if is_wrong else "no error", {}
        )

    async def end(self, run: PipelineRun) -> None:
        """Do nothing: there is nothing to clean up."""


def _pipeline(job: str) -> PipelineSpec:
    document = {
        "name": job,
        "jobs": [job],
        "trigger": {"image": job},
        "stages": [
            {
                "kind": "canary",
                "tasks": CANARIES,
                "soak_s": 20,
                "reach_s": 300,
                "gates": ["errors"],
            },
            {"kind": "percent", "percent": 50, "soak_s": 20, "reach_s": 600, "gates": ["errors"]},
            {"kind": "all", "reach_s": 600, "gates": ["errors"]},
        ],
        "gates": {
            "errors": {
                "query": {"promql": "errors", "at_most": 0.1},
                "every_s": 5,
                "deadline_s": 120,
            }
        },
    }
    return pipeline_spec(document, job)
