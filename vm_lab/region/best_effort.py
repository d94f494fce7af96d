"""Best-effort work in a simulated region: the production Optimus as a client, and its checker.

Three users submit pieces of work during the story. A modelled task has a number of seconds of work
to do. When it is stopped, it saves its progress (its checkpoint). A machine that loses power saves
nothing. The checker has two rules (EL8):

- `opportunistic`: tasks of the work run only on machines on loan to the work's entitlement;
- `work-lost`: in the end every task is done, and Optimus counted as many failures as tasks had.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.api import Health, Limits, RestartPolicy, RestartWhen, TaskState
from control_plane.api.capacity import EntitlementSpec, EntitlementView
from control_plane.api.elastic import CapacitySignal, Elastic, Promise
from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.api.opportunistic import QueuedState, QueuedWork, WorkRequest
from control_plane.optimus.service import Optimus
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store.memory import MemoryStore
from vm_lab.region.machine import Copy, SimulatedMachine
from vm_lab.region.plane import PlaneLife
from wire.errors import TwineError

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

OWNER = "spare"
"""The entitlement of the work; it has no machines of its own."""
STEP_S = 1.0
"""Seconds between two steps of the modelled tasks."""
ROUND_S = 10.0
"""Seconds between two rounds of Optimus."""
USERS = ("ann", "bob", "cay")
QUEUED_AHEAD = 12
"""Most tasks beyond the running ones that may wait for machines."""
RETURN_S = 60.0
"""Seconds that a task may run on a machine that is no longer lent: the agent may be unreachable, or
the machine was given back by force while the task was stopping."""


@dataclass(slots=True)
class ModelledTask:
    """Progress of one task, in seconds of work."""

    needs: float
    fails: int
    """How often it ends with an error before it succeeds."""
    saved: float = 0.0
    done: float = 0.0
    copy: tuple[str, int] = ("", 0)
    """Machine and invocation of the copy that does the work."""
    moves: int = 0
    failed: int = 0
    succeeded: int = 0


@dataclass(slots=True)
class BestEffortWork:
    """The work of all users, the Optimus that schedules it, and the checker."""

    region: SimulatedRegion
    pieces: int
    tasks: dict[str, ModelledTask] = field(default_factory=dict)
    requests: dict[str, tuple[str, WorkRequest]] = field(default_factory=dict)
    """Work → user and request."""
    counts: Counter[str] = field(default_factory=Counter)
    """`revoked` (tasks that continued on another machine), `checkpoints`, `done`, `failures`."""

    _store: MemoryStore = field(default_factory=MemoryStore)
    _optimus: Optimus | None = None
    _misplaced: dict[tuple[str, str], float] = field(default_factory=dict)
    """Machine and task → since when the task runs there although the machine is not lent to it."""

    def __post_init__(self) -> None:
        """Draw the work, and schedule its submission in the first half of the story."""
        region, name = self.region, f"{self.region.scenario.name} {self.region.seed} work"
        chance = random.Random(name)
        half_s = region.scenario.minutes * 30.0
        for number in range(self.pieces):
            spec = self._draw_job(f"work{number}", chance)
            request = WorkRequest(job=spec, priority=chance.choice((200, 500, 800)), attempts=4)
            at = 200.0 + chance.uniform(0.0, half_s)
            region.timeline.after(at, self._submit, chance.choice(USERS), request)
            for index in range(spec.tasks):
                fails = int(chance.random() < 0.1)
                self.tasks[f"{spec.name}-{index}"] = ModelledTask(chance.uniform(60, 420), fails)
        region.plane.images.add(_IMAGE)
        region.machine_context.known_images.add(_IMAGE)
        elastic = Elastic(borrow=region.scenario.shape.machines, notice=Promise.QUICK)
        spare = EntitlementSpec(machines=0, host_profile="soft-spare", elastic=elastic)
        region.timeline.after(5.0, region.clients.put_entitlement, OWNER, spare)
        region.plane.on_serving.append(self._begin)
        region.timeline.after(STEP_S, self._advance)
        before = region.more_unsettled
        region.more_unsettled = lambda: [*before(), *self._unsettled()]

    @staticmethod
    def _draw_job(name: str, chance: random.Random) -> JobSpec:
        return JobSpec(
            name=name,
            entitlement=OWNER,
            tasks=chance.randint(1, 4),
            image=_IMAGE,
            command=["/bin/work"],
            limits=Limits(memory_max_bytes=2 << 30, cpu_max_cores=2.0),
            restart=RestartPolicy(when=RestartWhen.NEVER),
        )

    # -- the scheduler, in each life of the control plane

    def _begin(self, life: PlaneLife) -> None:
        life.loop.create_task(self._run(life))

    async def _run(self, life: PlaneLife) -> None:
        runtime = SteppedRuntime(self.region.plane.wall_time, life.number)
        if life.number > 1:
            await self._store.__aexit__(None, None, None)
        async with self._store:
            front_end = _OptimusFrontEnd(life)
            optimus = Optimus(
                runtime, front_end, self._store, OWNER, {"ann": 200}, QUEUED_AHEAD, ROUND_S
            )
            await optimus.load()
            self._optimus = optimus
            for name, (user, request) in self.requests.items():
                await optimus.submit(name, request, user)
            await optimus.run()

    def _submit(self, user: str, request: WorkRequest) -> None:
        self.requests[request.job.name] = user, request
        life = self.region.plane.life
        if life is not None and life.alive and self._optimus is not None:
            life.loop.create_task(self._try_submit(self._optimus, user, request))

    @staticmethod
    async def _try_submit(optimus: Optimus, user: str, request: WorkRequest) -> None:
        try:
            await optimus.submit(request.job.name, request, user)
        except TwineError:
            await asyncio.sleep(0)  # the next life submits it again

    def queue(self) -> dict[str, QueuedWork]:
        """Return all work by name, from Optimus."""
        return {} if self._optimus is None else {w.name: w for w in self._optimus.queue().work}

    # -- the modelled tasks

    def _copies(self) -> Iterator[tuple[SimulatedMachine, Copy, ModelledTask]]:
        for machine in self.region.machines.values():
            for copy in list(machine.copies.values()):
                task = self.tasks.get(copy.task_id)
                if task is not None and copy.alive:
                    yield machine, copy, task

    def _advance(self) -> None:
        for machine, copy, task in self._copies():
            self._check_lent(machine, copy)
            this_copy = (machine.name, copy.invocation)
            if copy.state is TaskState.STOPPING and task.copy == this_copy:
                self.counts["checkpoints"] += task.done > task.saved
                task.saved = task.done
            elif copy.state is TaskState.RUNNING and copy.health is Health.HEALTHY:
                self._do_work(machine, copy, task, this_copy)
        self.region.timeline.after(STEP_S, self._advance)

    def _do_work(
        self, machine: SimulatedMachine, copy: Copy, task: ModelledTask, this_copy: tuple[str, int]
    ) -> None:
        if task.copy != this_copy:
            self.counts["revoked"] += task.copy[0] not in ("", machine.name)
            task.copy, task.done = this_copy, task.saved
        task.done += STEP_S
        if task.done < task.needs:
            return
        if task.failed < task.fails:
            task.failed += 1
            self.counts["failures"] += 1
            machine.end(copy, "exit-code", "it failed by itself")
            return
        task.saved = task.done
        task.succeeded += 1
        machine.end(copy, "success", "")

    # -- the checker

    def _check_lent(self, machine: SimulatedMachine, copy: Copy) -> None:
        """Check that a task of the work runs on a machine that is lent to its entitlement."""
        now, key = self.region.timeline.now, (machine.name, copy.task_id)
        checked = self.region.checker.machines[machine.name]
        if checked.entitlement == OWNER and checked.loan is not None:
            self._misplaced.pop(key, None)
            return
        since = self._misplaced.setdefault(key, now)
        is_undisturbed = now - self.region.checker.undisturbed_since
        if min(now - since, is_undisturbed) > RETURN_S:
            text = f"{copy.task_id} runs on {machine.name}, of {checked.entitlement or 'none'}"
            self.region.checker.violate("opportunistic", text, copy.task_id)

    def _unsettled(self) -> list[str]:
        """Return the work that is not over; once all is over, check its outcome."""
        if not self.region.story_at:
            return []
        known = self.queue()
        unfinished = [name for name in self.requests if name not in known]
        unfinished += [
            f"{name}: {work.state.value}: {work.reason}"
            for name, work in known.items()
            if work.state in (QueuedState.WAITING, QueuedState.RUNNING)
        ]
        serving = self.region.plane.serving
        unfinished += [
            f"{name}: its job is still there"
            for name in known
            if serving is not None and serving.entitlement_of(name) is not None
        ]
        if unfinished or len(self.requests) < self.pieces:
            return [f"{len(unfinished)} pieces of work are not over: {', '.join(unfinished[:3])}"]
        self._check_outcomes(known)
        return []

    def _check_outcomes(self, known: dict[str, QueuedWork]) -> None:
        for name, work in known.items():
            tasks = [t for key, t in self.tasks.items() if key.rpartition("-")[0] == name]
            failed = max((task.failed for task in tasks), default=0)
            if work.state is not QueuedState.DONE:
                text = f"{name} is {work.state.value} after {work.failures} failures: {work.reason}"
                self.region.checker.violate("work-lost", text, name)
            elif work.failures > sum(task.failed for task in tasks) or work.failures < failed:
                text = f"{name} counts {work.failures} failures, its tasks had {failed}"
                self.region.checker.violate("work-lost", text, name)
            elif undone := [task for task in tasks if not task.succeeded]:
                text = f"{name} is done, and {len(undone)} of its tasks are not"
                self.region.checker.violate("work-lost", text, name)
        self.counts["done"] = sum(w.state is QueuedState.DONE for w in known.values())


_IMAGE = f"sha256:{'e' * 64}"


@dataclass(frozen=True, slots=True)
class _OptimusFrontEnd:
    """The front end as Optimus calls it in one life of the control plane."""

    life: PlaneLife

    async def get_entitlement(self, name: str) -> EntitlementView:
        return await self.life.serving().capacity.get_entitlement(name)

    async def get_signal(self, entitlement: str) -> CapacitySignal:
        return self.life.serving().elastic.signal(entitlement)

    async def get_job(self, job: str) -> JobStatus:
        return await self.life.serving().get_job(job)

    async def apply_job(self, spec: JobSpec, *, is_new: bool = False) -> JobStatus:
        return await self.life.serving().apply_job(spec, is_new=is_new)

    async def stop_job(self, job: str) -> JobStatus:
        return await self.life.serving().stop_job(job)
