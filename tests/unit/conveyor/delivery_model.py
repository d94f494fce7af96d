"""Jobs in memory that behave as in the job API, a clock that tests step, and scripted gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from control_plane.api.intents import PushIntent
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from conveyor.api import PipelineSpec
from conveyor.core.acts import DeliveryAct, GiveBack, PushBack, PushStage, SetFrozen
from conveyor.core.evaluation import Measurement, evaluate_health, no_data
from conveyor.pipeline_file import pipeline_spec
from conveyor.push import push_change
from conveyor.records import DeliveryRecords
from conveyor.runs import GateOutcome, JobProgress, PipelineRun
from conveyor.service import DeliveryService
from wire.errors import Conflict, Unreachable

ME = "user:conveyor"
"""The writer name that the service puts into its writes."""


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def a_pipeline(**changes: Any) -> PipelineSpec:
    """Return a pipeline with the stages canary, half and all, and one gate that the test
    scripts."""
    document: dict[str, Any] = {
        "name": "web",
        "jobs": ["web"],
        "stages": [
            {"kind": "canary", "tasks": 1, "soak_s": "60s", "gates": ["errors"]},
            {"kind": "percent", "percent": 50, "soak_s": "60s", "gates": ["errors"]},
            {"kind": "all", "gates": ["errors"]},
        ],
        "gates": {"errors": {"query": {"promql": "errors", "at_most": 0.1}, "deadline_s": "5m"}},
        "trigger": {"image": "web"},
        **changes,
    }
    return pipeline_spec(document, "the test's pipeline")


@dataclass
class ModelJob:
    """A job that updates one task in each tick, as far as its push permits."""

    image: str = digest(1)
    base: str = digest(1)
    paused: bool = False
    tasks: list[str] = field(default_factory=lambda: [digest(1)] * 10)
    broken: set[str] = field(default_factory=set)
    push: PushIntent = field(default_factory=lambda: PushIntent(version=1))
    version: int = 0
    owner: str = ""
    reason: str = ""
    reasons: list[str] = field(default_factory=list)
    """The reasons of all writes, the oldest first."""
    held: str = ""
    went_back: str = ""

    def allowed(self) -> int:
        return self.push.of(len(self.tasks))

    def write(self, writer: str, image: str, push: PushIntent, reason: str = "") -> None:
        """Write the push as any writer does."""
        if image != self.image:
            self.base = max(set(self.tasks), key=self.tasks.count) if self.tasks else image
        self.image, self.push, self.reason = image, push, reason
        self.reasons.append(reason)
        self.owner, self.version, self.went_back = writer, self.version + 1, ""

    def want(self, image: str) -> None:
        """Roll back or apply a file, as an owner may do at any time."""
        self.write("", image, PushIntent(version=1))

    def tick(self) -> None:
        if self.paused or self.held:
            return
        new, allowed = self.tasks.count(self.image), self.allowed()
        if new > allowed:
            self.tasks[self.tasks.index(self.image)] = self.base
        elif new < allowed:
            if self.image in self.broken and self.image in self.tasks and self.image != self.base:
                return  # the budget is used up
            old = next(i for i, image in enumerate(self.tasks) if image != self.image)
            self.tasks[old] = self.image

    def resize(self, size: int) -> None:
        tasks = self.tasks
        whole = self.push.is_whole
        new = self.image if whole else self.base
        self.tasks = (tasks + [new] * size)[:size]

    def seen(self, job: str, image: str) -> JobProgress:
        new = self.tasks.count(image)
        bad = sum(task in self.broken for task in self.tasks)
        settled = bad == 0 and all(task == self.image for task in self.tasks)
        return JobProgress(
            job=job,
            image=self.image,
            size=len(self.tasks),
            new=new,
            new_healthy=0 if image in self.broken else new,
            new_unhealthy=new if image in self.broken else 0,
            healthy=len(self.tasks) - bad,
            updating=any(task != self.image for task in self.tasks),
            settled=settled,
            frozen=self.paused,
            push=self.push,
            push_version=self.version,
            push_reason=self.reason,
            owner=self.owner,
            went_back=self.went_back,
            held=self.held,
            new_tasks=tuple(f"{job}-{i}" for i, t in enumerate(self.tasks) if t == image),
            stable_tasks=tuple(f"{job}-{i}" for i, t in enumerate(self.tasks) if t != image),
        )


class Killed(BaseException):
    """The process is killed here."""


class ModelPlane:
    """Implements `PushWriter` over model jobs. It can be unavailable, and can kill its caller."""

    def __init__(self) -> None:
        self.jobs = {"web": ModelJob()}
        self.images: dict[str, str] = {"web": digest(1)}
        self.unknown = {digest(99)}
        """Digests that the image store does not have."""
        self.is_away = False
        self.kill_in: int | None = None
        """Number of awaits until the process is killed, before or after the change."""
        self.calls: list[tuple[str, ...]] = []
        self.before_write: Callable[[], None] | None = None
        """Called once between the reading of a job and the write that follows."""

    def point(self) -> None:
        """Mark a place where the process may be killed."""
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                self.kill_in = None
                raise Killed

    def _call(self) -> None:
        self.point()
        if self.is_away:
            raise Unreachable("the front end does not answer")

    async def read_progress(self, job: str, image: str) -> JobProgress:
        self._call()
        found = self.jobs.get(job)
        return JobProgress(job=job) if found is None else found.seen(job, image)

    async def newest_image(self, name: str) -> str:
        self._call()
        if name.startswith("sha256:"):
            return "" if name in self.unknown else name
        return self.images.get(name, "")

    async def write(self, act: DeliveryAct) -> None:
        self._call()
        if self.before_write is not None:
            self.before_write()
            self.before_write = None
        found = self.jobs[act.job]
        if isinstance(act, SetFrozen):
            found.paused = act.frozen
            self.calls.append(("freeze" if act.frozen else "thaw", act.job))
            self.point()
            return
        change = push_change(act)
        if change.expect != found.version:
            raise Conflict(f"the push is at version {found.version}, not {change.expect}")
        if found.owner not in ("", ME) and not change.take_over:
            raise Conflict(f"{found.owner} is its writer")
        push = PushIntent(version=1, share=change.share, tasks=change.tasks)
        owner = "" if change.gives_back else ME
        found.write(owner, change.image or found.image, push, change.reason)
        match act:
            case PushStage():
                self.calls.append(("push", act.job, act.image, act.stage.kind.value))
            case PushBack():
                self.calls.append(("back", act.job, act.image))
            case GiveBack():
                self.calls.append(("give", act.job))
        self.point()


class ScriptedMeter:
    """Gates return what the test sets. Health is measured as in production."""

    def __init__(self, plane: ModelPlane) -> None:
        self.plane = plane
        self.measured: dict[str, Measurement] = {}
        self.default = Measurement(GateOutcome.PASS, "0.01 errors", {"max": 0.01})
        self.bad: set[str] = set()
        """Images that fail the gates."""

    async def end(self, run: PipelineRun) -> None:
        self.plane.point()

    async def measure(
        self, name: str, run: PipelineRun, jobs: Sequence[JobProgress], now: float
    ) -> Measurement | None:
        self.plane.point()
        gate = run.spec.gates[name]
        if gate.health is not None:
            return evaluate_health(gate.health, jobs, run.steps[-1].restarts or 0)
        if any(job.image in self.bad for job in jobs):
            return Measurement(GateOutcome.FAIL, "0.4 errors, at most 0.1", {"max": 0.4})
        return self.default


NO_DATA = no_data("Prometheus does not answer")


class KillableStore(MemoryStore):
    """A store at which the process may be killed before and after each write."""

    plane: ModelPlane | None = None

    async def txn(self, compare: Any, operations: Any) -> int:
        if self.plane is not None:
            self.plane.point()
        revision = await super().txn(compare, operations)
        if self.plane is not None:
            self.plane.point()
        return revision


class World:
    """One service over model jobs, on a clock that the test steps."""

    def __init__(self, spec: PipelineSpec | None = None) -> None:
        self.now = 1_800_000_000.0
        self.plane = ModelPlane()
        self.meter = ScriptedMeter(self.plane)
        self.store = KillableStore()
        self.sent: list[tuple[str, PipelineRun]] = []
        self.spec = spec or a_pipeline()
        self.service: DeliveryService

    async def begin(self) -> World:
        await self.store.__aenter__()
        self.restart()
        await self.service.apply(self.spec, "user:ann")
        return self

    def restart(self, boot: str = "") -> None:
        """Start a new process on the same store, on this boot of a host."""
        runtime = Runtime()
        runtime.date = lambda: self.now  # type: ignore[method-assign]
        records = DeliveryRecords(self.store)
        meter: Any = self.meter
        self.service = DeliveryService(records, self.plane, runtime, meter, self._send, boot=boot)

    async def _send(self, url: str, message: object) -> None:
        assert isinstance(message, PipelineRun)
        self.sent.append((url, message))

    async def rounds(self, count: int, step_s: float = 10.0) -> None:
        """Let time pass: jobs tick, and the service runs its rounds."""
        for _ in range(count):
            self.now += step_s
            for job in self.plane.jobs.values():
                job.tick()
            await self.service.round(self.spec.name)

    async def until(self, *states: str, most: int = 400) -> PipelineRun:
        """Let time pass until a run has ended in one of these states."""
        for _ in range(most):
            await self.rounds(1)
            view = await self.service.view(self.spec.name)
            if view.record.active is None and view.last is not None and view.last.state in states:
                return view.last
        raise AssertionError(f"no run ended as {states}: {msgspec.json.encode(view.record)!r}")

    async def run(self) -> PipelineRun:
        """Return the active run."""
        found = (await self.service.view(self.spec.name)).record.active
        assert found is not None
        return found
