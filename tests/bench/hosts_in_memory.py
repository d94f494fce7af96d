"""Agents in memory that answer like real ones: with delays, and with events.

A machine without events costs nothing: its heartbeat is computed on request, and its stream of
events waits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from msgspec.structs import replace

from agent import api
from agent.api import Health, ProfileState, TaskState
from agent.api.notices import HostNotices
from agent.usage import Usages
from control_plane.agents.protocol import EventStream
from control_plane.api.machines import MachineRecord
from wire.errors import NotFound, Unreachable

IMAGE = "sha256:" + "1" * 64
ANSWER_S = 0.002
START_S, STOP_S, SWITCH_S = (0.3, 1.2), (0.1, 0.4), (0.5, 1.5)
"""Seconds from the request to the event of its completion: minimum and maximum."""
GIVEN_UP_S = 4.0
"""Seconds after which a request without an answer is given up."""
POLL_S = 3.0
"""Seconds for which requests for events are held: a cut connection is noticed within this time."""


class Hosts:
    """All machines, and counts of the running tasks on machines that are on."""

    def __init__(self, seed: int = 1) -> None:
        self.chance = random.Random(seed)
        self.by_name: dict[str, Host] = {}
        self.running: dict[str, int] = {}
        """Release → number of its healthy tasks."""
        self.calls = 0
        self.start_s, self.stop_s = START_S, STOP_S

    def add(self, name: str, location: api.Location) -> MachineRecord:
        host = self.by_name[name] = Host(self, name)
        return MachineRecord(
            machine=name,
            location=location,
            machine_type="default",
            address=f"{name}.example:7443",
            facts=host.facts,
        )

    def agent(self, record: MachineRecord) -> Agent:
        return Agent(self.by_name[record.machine])

    def between(self, bounds: tuple[float, float]) -> float:
        return self.chance.uniform(*bounds)


class Host:
    """One machine."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.hosts, self.name = hosts, name
        self.facts = api.MachineFacts(
            machine_id=name,
            boot_id=f"{name}-1",
            kernel="6.12",
            cpu_model="bench",
            cpus=16,
            sockets=1,
            numa_nodes=1,
            memory_bytes=32 << 30,
            disk_bytes=1 << 40,
            disk_free_bytes=1 << 40,
            agent_version="0",
        )
        self.off_at: float | None = None
        self.boots = 1
        self.tasks: dict[str, tuple[api.TaskStatus, str]] = {}
        """Task → its status and its release."""
        self.images: list[api.ImageInfo] = []
        self.profile = api.ProfileStatus()
        self.events: list[api.Event] = []
        self.sequence = 0
        self.more: asyncio.Future[None] | None = None

    def power_off(self) -> None:
        """Stop without an event: followers notice it when their request times out."""
        loop = asyncio.get_running_loop()
        self.off_at = loop.time()
        for status, release in self.tasks.values():
            self._count(status, release, -1)
        loop.call_later(GIVEN_UP_S + self.hosts.between((0.0, POLL_S)), self.wake)

    def power_on(self) -> None:
        """Boot; the tasks do not start again."""
        self.off_at, self.boots = None, self.boots + 1
        self.facts = replace(self.facts, boot_id=f"{self.name}-{self.boots}")
        self.tasks, self.events, self.sequence = {}, [], 0

    def wake(self) -> None:
        if self.more is not None and not self.more.done():
            self.more.set_result(None)

    def send_event(self, kind: str, name: str, task: api.TaskStatus | None = None) -> None:
        self.sequence += 1
        self.events.append(
            api.Event(sequence=self.sequence, at=0.0, kind=kind, object=name, message="", task=task)
        )
        self.wake()

    def start(self, task: str, release: str) -> None:
        if self.off_at is None and task in self.tasks and self.tasks[task][1] == release:
            status = replace(self.tasks[task][0], state=TaskState.RUNNING, health=Health.HEALTHY)
            self.tasks[task] = (status, release)
            self._count(status, release, 1)
            self.send_event("task", task, status)

    def stop(self, task: str) -> None:
        if self.off_at is None and task in self.tasks:
            del self.tasks[task]
            self.send_event("task-removed", task)

    def verified(self) -> None:
        self.profile = replace(self.profile, state=ProfileState.VERIFIED)
        self.send_event("profile", self.profile.name)

    def _count(self, status: api.TaskStatus, release: str, one: int) -> None:
        if status.health is Health.HEALTHY:
            self.hosts.running[release] = self.hosts.running.get(release, 0) + one

    def leave(self, task: str) -> None:
        self._count(*self.tasks[task], -1)


class Events:
    """The events of one machine from a sequence number on."""

    def __init__(self, host: Host, after: int) -> None:
        self.host, self.after, self.boots = host, after, host.boots

    @property
    def last_contact_at(self) -> float:
        off = self.host.off_at
        return asyncio.get_running_loop().time() if off is None else off

    async def next(self) -> api.Events:
        host, now = self.host, asyncio.get_running_loop().time
        while host.off_at is not None or host.sequence <= self.after:
            given_up = host.off_at is not None and now() >= host.off_at + GIVEN_UP_S
            if given_up or host.boots != self.boots:
                raise Unreachable(f"cannot reach {host.name}")
            host.more = asyncio.get_running_loop().create_future()
            await host.more
        events = [event for event in host.events if event.sequence > self.after]
        host.events = []
        self.after = host.sequence
        return api.Events(
            events=events, latest=host.sequence, lost=False, boot_id=host.facts.boot_id
        )

    async def close(self) -> None:
        return None


class Agent:
    """Implements `control_plane.agents.protocol.AgentApi` for one machine."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def _answer(self) -> Host:
        self.host.hosts.calls += 1
        if self.host.off_at is not None:
            await asyncio.sleep(GIVEN_UP_S)
            raise Unreachable(f"cannot reach {self.host.name}")
        await asyncio.sleep(ANSWER_S)
        return self.host

    def _later(self, bounds: tuple[float, float], *call: object) -> None:
        after_s = self.host.hosts.between(bounds)
        asyncio.get_running_loop().call_later(after_s, *call)  # type: ignore[arg-type]

    async def get_machine(self) -> api.MachineFacts:
        return (await self._answer()).facts

    async def list_images(self) -> api.Images:
        return api.Images(images=(await self._answer()).images)

    async def pull_image(self, pull: api.ImagePull) -> api.ImageInfo:
        host = await self._answer()
        await asyncio.sleep(0.2)
        image = image_of(pull.digest)
        host.images.append(image)
        host.send_event("image", pull.digest)
        return image

    async def list_tasks(self) -> api.Tasks:
        host = await self._answer()
        return api.Tasks(tasks=[status for status, _ in host.tasks.values()])

    async def put_task(self, task_id: str, spec: api.TaskSpec) -> api.TaskStatus:
        host = await self._answer()
        if task_id in host.tasks:
            host.leave(task_id)
        release = spec.environment["RELEASE"]
        status = api.TaskStatus(
            task_id=task_id,
            generation=spec.generation,
            epoch=spec.epoch,
            state=TaskState.STARTING,
            health=Health.UNKNOWN,
            image=spec.image,
            entitlement=spec.entitlement,
            job=spec.job,
        )
        host.tasks[task_id] = (status, release)
        host.send_event("task", task_id, status)
        self._later(host.hosts.start_s, host.start, task_id, release)
        return status

    async def delete_task(
        self, task_id: str, generation: int | None = None, epoch: int | None = None
    ) -> api.TaskStatus:
        host = await self._answer()
        if task_id not in host.tasks:
            raise NotFound(f"no task {task_id}")
        host.leave(task_id)
        status, release = host.tasks[task_id]
        status = replace(
            status,
            generation=generation or 0,
            epoch=epoch or 0,
            state=TaskState.STOPPING,
            health=Health.UNKNOWN,
        )
        host.tasks[task_id] = (status, release)
        self._later(host.hosts.stop_s, host.stop, task_id)
        return status

    async def task_logs(
        self,
        task_id: str,
        *,
        follow: bool = False,
        since: str | None = None,
        tail: int | None = None,
        previous: bool = False,
    ) -> AsyncIterator[bytes]:
        yield f"{task_id} {follow} {since} {tail}".encode()

    async def put_notices(self, notices: HostNotices) -> HostNotices:
        return notices

    async def put_profile(self, spec: api.ProfileSpec) -> api.ProfileStatus:
        host = await self._answer()
        host.profile = api.ProfileStatus(
            name=spec.name,
            generation=spec.generation,
            epoch=spec.epoch,
            state=ProfileState.APPLYING,
        )
        self._later(SWITCH_S, host.verified)
        return host.profile

    async def get_profile(self) -> api.ProfileStatus:
        return (await self._answer()).profile

    async def get_usage(self) -> Usages:
        await self._answer()
        return Usages(at_boot_s=asyncio.get_running_loop().time(), tasks=[])

    async def get_events(self, after: int, wait_s: float = 0.0) -> api.Events:
        host = await self._answer()
        assert not wait_s, "events are followed"
        return api.Events(
            events=[], latest=host.sequence, lost=after > host.sequence, boot_id=host.facts.boot_id
        )

    def follow(self, after: int) -> EventStream:
        return Events(self.host, after)

    async def close(self) -> None:
        return None


def image_of(digest: str) -> api.ImageInfo:
    return api.ImageInfo(digest=digest, format=api.ImageFormat.TAR, stream_bytes=1, created_at=0.0)


async def find_image(digest: str) -> api.ImageInfo | None:
    return image_of(digest)
