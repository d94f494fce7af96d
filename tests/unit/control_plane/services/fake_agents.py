"""A region of machines in memory, with agents that keep the rules of the agent API.

They refuse older generations and epochs, and remember those of removed tasks. They take time to
start, stop and switch profiles. Violations of the rules are recorded in `broken_rules`.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from inventory import some_facts
from msgspec.structs import replace
from virtual_time import RUNTIME, clock

from agent import api
from agent.api import Health, ProfileState, TaskState
from agent.api.joining import JoinRequest
from agent.api.notices import HostNotices
from agent.usage import TaskUsage, Usages
from control_plane.agents.polled import PolledEvents, PollPatience
from control_plane.api.machines import MachineRecord
from control_plane.broker.core.capacity import usable_memory
from wire.errors import Busy, Conflict, NotFound, Refused, Unprocessable, Unreachable

ALIVE = (TaskState.STARTING, TaskState.RUNNING, TaskState.STOPPING)
IMAGE = "sha256:" + "1" * 64
IMAGE_2 = "sha256:" + "2" * 64
PATIENCE_S = 5.5
"""Patience with the default settings and with a request for events."""


@dataclass
class Behaviour:
    """Behaviour of a machine; tests change it."""

    start_s: float = 0.5
    stop_s: float = 0.5
    switch_s: float = 1.0
    pull_s: float = 0.5
    reboot_s: float = 30.0
    healthy: Callable[[api.TaskSpec], bool] = lambda spec: True
    profile_end: dict[str, ProfileState] = field(default_factory=dict)
    """Profile name → how a switch to it ends, if not verified."""
    refuse_pull: str = ""
    refuse_profile: str = ""
    list_s: float = 0.0
    """Delay of the agent's answer to a list of its tasks."""
    answer_s: float = 0.0
    """Delay of every answer of the agent; the kernel accepts connections at once."""


class Region:
    """All machines, and the rules that were broken."""

    def __init__(self) -> None:
        self.machines: dict[str, FakeMachine] = {}
        self.used: dict[str, tuple[float, int]] = {}
        """Task → cores and bytes in use. If empty, agents repeat the values from boot."""
        self.broken_rules: list[str] = []
        self.log: list[str] = []

    def add(
        self, name: str, datacenter: str, msb: str, memory_mib: int = 1024, region: str = "local"
    ) -> "FakeMachine":
        location = api.Location(region=region, datacenter=datacenter, msb=msb)
        machine = FakeMachine(self, name, location, memory_mib)
        self.machines[name] = machine
        return machine

    def agent(self, record: MachineRecord) -> "FakeAgent":
        return FakeAgent(self.machines[record.machine])

    def copies(self, task: str) -> list[str]:
        """Return the machines on which a task is alive."""
        return [
            m.name
            for m in self.machines.values()
            if task in m.tasks and m.tasks[task].state in ALIVE
        ]

    def where(self) -> dict[str, list[str]]:
        """Return machine → tasks that are alive on it."""
        return {
            m.name: sorted(t for t, s in m.tasks.items() if s.state in ALIVE)
            for m in self.machines.values()
        }

    def broke(self, rule: str) -> None:
        self.broken_rules.append(f"{clock():.1f}: {rule}")


class FakeMachine:
    """One machine and the state of its agent."""

    def __init__(self, region: Region, name: str, location: api.Location, memory_mib: int) -> None:
        self.region, self.name, self.location = region, name, location
        self.behaviour = Behaviour()
        self.reachable = True
        self.refusing = False
        """Whether the agent is dead on a host that is alive."""
        self.leaving = False
        """Whether the host has announced its shutdown."""
        self.on = True
        self.boots = 1
        self.memory_bytes = memory_mib << 20
        self.tasks: dict[str, api.TaskStatus] = {}
        self.specs: dict[str, api.TaskSpec] = {}
        self.last_generation: dict[str, int] = {}
        self.epoch = 0
        self.notices: list[HostNotices] = []
        self.images: set[str] = set()
        self.hugepages_bytes = 0
        self.capabilities = ["configuration"]
        self.profile = api.ProfileStatus()
        self.wanted = api.ProfileSpec(name="none")
        self.events: list[api.Event] = []
        self.sequence = 0
        self.more = asyncio.Event()
        self.starts: list[str] = []
        self.runs = 0
        self.jobs: set[asyncio.Task[None]] = set()

    def facts(self) -> api.MachineFacts:
        return some_facts(
            self.name,
            boot_id=f"{self.name}-boot-{self.boots}",
            memory_bytes=self.memory_bytes,
            hugepages_bytes=self.hugepages_bytes,
            capabilities=self.capabilities,
            leaving=self.leaving,
        )

    def join(self) -> JoinRequest:
        return JoinRequest(
            token="",
            machine=self.name,
            csr_pem="",
            address=f"{self.name}.example:7443",
            location=self.location,
            facts=self.facts(),
        )

    # -- actions of tests

    def power_off(self) -> None:
        self.on = self.reachable = False
        for job in self.jobs:
            job.cancel()
        for name, status in self.tasks.items():
            self.tasks[name] = replace(status, state=TaskState.STOPPED, health=Health.UNKNOWN)

    def power_on(self) -> None:
        """Boot. Tasks do not restart automatically, and the profile is verified again."""
        self.boots += 1
        self.on = self.reachable = True
        self.events, self.sequence = [], 0
        lost = api.Exit(result="lost", at=clock())
        for name, status in self.tasks.items():
            self.tasks[name] = replace(status, state=TaskState.STOPPED, last_exit=lost)
        if self.profile.name:
            self.profile = replace(self.profile, state=ProfileState.APPLYING)
            self.spawn(self._switch(self.wanted))

    def kill_task(self, task: str) -> None:
        """Remove a task without any report."""
        del self.tasks[task]
        self.send_event("task-removed", task)

    def report(self, task: str, **changes: object) -> None:
        """Change the state of a task without a command."""
        self._set(replace(self.tasks[task], **changes))

    # -- inside

    def spawn(self, coroutine) -> None:
        job = asyncio.create_task(coroutine)
        self.jobs.add(job)
        job.add_done_callback(self.jobs.discard)

    def send_event(self, kind: str, name: str, task: api.TaskStatus | None = None) -> None:
        self.sequence += 1
        self.events.append(
            api.Event(
                sequence=self.sequence, at=clock(), kind=kind, object=name, message="", task=task
            )
        )
        self.more.set()
        self.more = asyncio.Event()

    def _set(self, status: api.TaskStatus) -> None:
        self.tasks[status.task_id] = status
        self.send_event("task", status.task_id, status)
        self.check()

    def check(self) -> None:
        alive = [t for t, s in self.tasks.items() if s.state in ALIVE]
        memory = sum(self.specs[t].limits.memory_max_bytes for t in alive if t in self.specs)
        if memory > usable_memory(self.facts().memory_bytes):
            self.region.broke(f"{self.name} is over its memory with {alive}")
        for task in alive:
            copies = self.region.copies(task)
            if len(copies) > 1 and all(self.region.machines[m].reachable for m in copies):
                self.region.broke(f"{task} runs on {copies}")

    async def _start(self, task: str, spec: api.TaskSpec, was_alive: bool) -> None:
        if was_alive:
            await asyncio.sleep(self.behaviour.stop_s)
        await asyncio.sleep(self.behaviour.start_s)
        self.runs += 1
        healthy = Health.HEALTHY if self.behaviour.healthy(spec) else Health.UNHEALTHY
        self._set(
            replace(
                self.tasks[task],
                state=TaskState.RUNNING,
                health=healthy,
                invocation_id=f"{self.name}-{self.runs}",
                last_exit=None,
                addresses=self.addresses(task, spec),
            )
        )

    def addresses(self, task: str, spec: api.TaskSpec) -> list[str]:
        """Return addresses of a private network that distinguish tasks and machines."""
        if spec.network.mode is not api.NetworkMode.PRIVATE:
            return []
        machine, own = (zlib.crc32(name.encode()) & 0xFFFF for name in (self.name, task))
        return [f"fd00:7477::{machine:x}:{own:x}", "100.64.0.9"]

    async def _stop(self, task: str) -> None:
        await asyncio.sleep(self.behaviour.stop_s)
        self.tasks.pop(task, None)
        self.specs.pop(task, None)
        self.send_event("task-removed", task)

    async def _switch(self, wanted: api.ProfileSpec) -> None:
        await asyncio.sleep(self.behaviour.switch_s)
        end = self.behaviour.profile_end.get(wanted.name, ProfileState.VERIFIED)
        if end is ProfileState.PENDING_REBOOT and wanted.allow_reboot:
            self._profile(ProfileState.PENDING_REBOOT)
            await asyncio.sleep(1)
            self.behaviour.profile_end.pop(wanted.name)
            self.spawn_reboot()
            return
        self._profile(end)

    def spawn_reboot(self) -> None:
        async def reboot() -> None:
            await asyncio.sleep(self.behaviour.reboot_s)
            self.jobs.clear()
            self.power_on()

        self.power_off()
        self.spawn(reboot())

    def _profile(self, state: ProfileState) -> None:
        self.profile = replace(self.profile, state=state)
        self.send_event("profile", self.profile.name)


class FakeAgent:
    """Implements `control_plane.agents.protocol.AgentApi` for one machine."""

    def __init__(self, machine: FakeMachine) -> None:
        self.machine = machine

    async def _enter(self) -> FakeMachine:
        await asyncio.sleep(0.01)
        if self.machine.refusing:
            raise Refused(f"cannot reach {self.machine.name}: connection refused")
        if not self.machine.reachable:
            await asyncio.sleep(1.0)
            raise Unreachable(f"cannot reach {self.machine.name}: no answer")
        return self.machine

    async def get_machine(self) -> api.MachineFacts:
        m = await self._enter()
        if m.behaviour.answer_s > PATIENCE_S:  # as in `PolledAgent`
            await asyncio.sleep(PATIENCE_S)
            raise Busy(f"{m.name} accepts connections and does not answer")
        return m.facts()

    async def list_images(self) -> api.Images:
        m = await self._enter()
        return api.Images(images=[_image(digest) for digest in sorted(m.images)])

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        m = await self._enter()
        await asyncio.sleep(m.behaviour.pull_s)
        if m.behaviour.refuse_pull:
            raise Unprocessable(m.behaviour.refuse_pull)
        m.images.add(pull.digest)
        m.send_event("image", pull.digest)
        return _image(pull.digest)

    async def list_tasks(self) -> api.Tasks:
        m = await self._enter()
        await asyncio.sleep(m.behaviour.list_s)
        return api.Tasks(tasks=list(m.tasks.values()))

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        m = await self._enter()
        self._fence(task_id, spec.generation, spec.epoch)
        if spec.generation == m.last_generation.get(task_id) and task_id in m.tasks:
            return m.tasks[task_id]
        if m.profile.state is not ProfileState.VERIFIED or m.profile.name != m.wanted.name:
            m.region.broke(f"{task_id} started on {m.name} before its profile was verified")
        if spec.image not in m.images:
            raise Unprocessable(f"image {spec.image} is not on this machine")
        was_alive = task_id in m.tasks and m.tasks[task_id].state in ALIVE
        m.last_generation[task_id] = spec.generation
        m.specs[task_id] = spec
        m.starts.append(task_id)
        m._set(
            api.TaskStatus(
                task_id=task_id,
                generation=spec.generation,
                epoch=spec.epoch,
                state=TaskState.STARTING,
                health=Health.UNKNOWN,
                image=spec.image,
                entitlement=spec.entitlement,
                job=spec.job,
            )
        )
        m.spawn(m._start(task_id, spec, was_alive))
        return m.tasks[task_id]

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        m = await self._enter()
        assert generation is not None
        assert epoch is not None
        self._fence(task_id, generation, epoch)
        m.last_generation[task_id] = generation
        status = m.tasks.get(task_id)
        if status is None:
            raise NotFound(f"no task {task_id}")
        if status.state is not TaskState.STOPPING:
            state = TaskState.STOPPING if status.state in ALIVE else status.state
            m._set(replace(status, generation=generation, state=state))
            m.spawn(m._stop(task_id))
        return m.tasks[task_id]

    async def get_task(self, task_id: str) -> api.TaskStatus:
        m = await self._enter()
        if task_id not in m.tasks:
            raise NotFound(f"no task {task_id}")
        return m.tasks[task_id]

    async def restart_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        return await self.get_task(task_id)

    async def get_usage(self) -> Usages:
        m = await self._enter()
        used = m.region.used
        tasks = [
            TaskUsage(
                task_id=task,
                processes=3,
                cpu_s=used.get(task, (0.0, 0))[0] * clock(),
                memory_bytes=used.get(task, (0.0, 0))[1],
            )
            for task in m.tasks
        ]
        return Usages(at_boot_s=clock() if used else 1.0, tasks=tasks)

    def open_exec(self, task_id: str, options: dict[str, str]) -> None:
        raise NotFound(f"{task_id} has nothing inside")

    def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        async def lines() -> AsyncIterator[bytes]:
            m = await self._enter()
            yield f"{task_id} on {m.name} follow={follow} since={since} tail={tail}\n".encode()

        return lines()

    async def put_notices(self, notices: HostNotices) -> HostNotices:
        m = await self._enter()
        m.notices.append(notices)
        return notices

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        m = await self._enter()
        if m.behaviour.refuse_profile:
            raise Unprocessable(m.behaviour.refuse_profile)
        if spec.generation < m.profile.generation or spec.epoch < m.epoch:
            raise Conflict(f"profile generation {spec.generation} is old")
        m.epoch = max(m.epoch, spec.epoch)
        if spec.generation == m.profile.generation:
            return m.profile
        m.wanted = spec
        m.profile = api.ProfileStatus(
            name=spec.name,
            generation=spec.generation,
            epoch=spec.epoch,
            state=ProfileState.APPLYING,
        )
        m.spawn(m._switch(spec))
        return m.profile

    async def get_profile(self) -> api.ProfileStatus:
        return (await self._enter()).profile

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        m = await self._enter()
        await asyncio.sleep(m.behaviour.answer_s)
        boot = m.boots
        if wait_s and after >= m.sequence:
            try:
                async with asyncio.timeout(wait_s):
                    await m.more.wait()
            except TimeoutError:
                pass
        if not m.reachable:
            await asyncio.sleep(30)
            raise Unreachable(f"cannot reach {m.name}: connection lost")
        return api.Events(
            events=[e for e in m.events if e.sequence > after],
            latest=m.sequence,
            lost=after > m.sequence or boot != m.boots,
            boot_id=m.facts().boot_id,
        )

    def follow(self, after: int) -> PolledEvents:
        async def takes() -> bool:
            return self.machine.reachable

        return PolledEvents(self.get_events, takes, RUNTIME, after, PollPatience(3.0, PATIENCE_S))

    async def close(self) -> None:
        return None

    def _fence(self, task: str, generation: int, epoch: int) -> None:
        m = self.machine
        if epoch < m.epoch:
            raise Conflict(f"epoch {epoch} is old, {m.epoch} is in force")
        m.epoch = epoch
        if generation < m.last_generation.get(task, 0):
            raise Conflict(f"generation {generation} of {task} is old")


def _image(digest: str) -> api.ImageInfo:
    return api.ImageInfo(digest=digest, format=api.ImageFormat.TAR, stream_bytes=1, created_at=0.0)


async def find_image(digest: str) -> api.ImageInfo | None:
    return _image(digest) if digest in (IMAGE, IMAGE_2) else None
