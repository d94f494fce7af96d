"""Builds values and machines for tests. Every argument has a default: pass only what the test is
about."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agent import api
from agent.client import AgentClient
from agent.config import AgentConfig
from agent.daemon import Agent
from agent.machine import HostAccess
from agent.machine.fake import FakeMachine
from agent.machine.fake_programs import ends_with
from agent.runtime.core.records import TaskRecord, key_of
from agent.services import AgentServices
from agent.tasks.core.lifecycle import ObservedTask, ObservedUnit
from wire.errors import NotFound

IMAGE = "sha256:" + "1" * 64
OTHER_IMAGE = "sha256:" + "2" * 64
BOOT = "boot-1"


def a_spec(**fields: Any) -> api.TaskSpec:
    """Return a task's specification; its back-off is too short to wait for."""
    quick = api.RestartPolicy(backoff_s=0.001, backoff_max_s=0.01)
    return api.TaskSpec(**{"image": IMAGE, "command": ["/bin/server"], "restart": quick, **fields})


def a_record(**fields: Any) -> TaskRecord:
    """Return the record of a newly accepted task."""
    return TaskRecord(**{"task_id": "web", "spec": a_spec(), **fields})


def a_unit(task: TaskRecord | None = None, **fields: Any) -> ObservedUnit:
    """Return a unit that runs what the task asks for."""
    spec = (task or a_record()).spec
    return ObservedUnit(
        **{
            "active": "active",
            "sub": "running",
            "result": "success",
            "invocation_id": "i1",
            "key": key_of(spec),
            "started_at": 90.0,
            **fields,
        }
    )


def an_ended_unit(task: TaskRecord | None = None, code: int = 1, **fields: Any) -> ObservedUnit:
    """Return a unit whose process ended with this code at second 100."""
    good = code == 0
    return a_unit(
        task,
        **{
            "active": "active" if good else "failed",
            "sub": "exited" if good else "failed",
            "result": "success" if good else "exit-code",
            "exit_code": code,
            "exited_at": 100.0,
            **fields,
        },
    )


def seen(unit: ObservedUnit | None = None, **fields: Any) -> ObservedTask:
    """Return an observation of a task whose root exists by default."""
    return ObservedTask(**{"unit": unit, "root": True, "leftover": True, "boot_id": BOOT, **fields})


def a_tar(**files: str) -> bytes:
    """Return an image's archive with these files in it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, text in (files or {"hello": "world"}).items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def digest_of(data: bytes) -> str:
    """Return the digest that names the image of a stream."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


async def chunks_of(data: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    """Yield the data in pieces."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


@dataclass
class FakeHost:
    """A machine in memory with the files of its agent. It outlives the agents that run on it."""

    folder: Path
    fake: FakeMachine = field(init=False)
    config: AgentConfig = field(init=False)

    def __post_init__(self) -> None:
        self.fake = FakeMachine(self.folder)
        self.fake.systemd.programs["find"] = ends_with(0)
        self.config = AgentConfig(
            state_dir=str(self.state),
            run_dir=str(self.folder / "run"),
            socket=str(self.folder / "run" / "a.sock"),
            socket_group="root",
            listen="127.0.0.1:0",
            sidekick="/opt/twine/bin/sidekick",
            sidekick_state_dir=str(self.folder / "sidekick"),
        )

    @property
    def state(self) -> Path:
        """Return the agent's state folder."""
        return self.folder / "state"

    def give_image(self, digest: str = IMAGE) -> str:
        """Put a complete image in place without an agent."""
        name = digest.removeprefix("sha256:")
        images = self.state / "images"
        images.mkdir(parents=True, exist_ok=True)
        self.fake.btrfs.create(images / name)
        self.fake.btrfs.set_read_only(images / name, True)
        info = api.ImageInfo(
            digest=digest, format=api.ImageFormat.TAR, stream_bytes=1, created_at=time.time()
        )
        (images / f"{name}.json").write_bytes(msgspec.json.encode(info))
        return digest

    @asynccontextmanager
    async def agent(self, machine: HostAccess | None = None) -> AsyncIterator[AgentClient]:
        """Run an agent on the machine and yield a client of its socket."""
        async with self.serving(machine) as (_, client):
            yield client

    @asynccontextmanager
    async def serving(
        self, machine: HostAccess | None = None
    ) -> AsyncIterator[tuple[AgentServices, AgentClient]]:
        """Run an agent and yield its client and its services."""
        agent = Agent(self.config, machine or self.fake.machine)
        async with (
            agent.running() as services,
            AgentClient(f"unix:{self.config.socket}") as client,
        ):
            yield services, client

    def units(self) -> list[str]:
        """Return the names of all units of tasks."""
        return sorted(u.unit for u in self.fake.systemd.units("twine-task-*.service"))

    def roots(self) -> list[str]:
        """Return the ids of all tasks that have a root."""
        return self.fake.btrfs.children(self.state / "tasks")

    def invocation(self, task_id: str) -> str:
        """Return the invocation id of a task's unit, empty without one."""
        unit = self.fake.systemd.find(f"twine-task-{task_id}.service")
        return unit.invocation_id if unit else ""


def unit(task_id: str) -> str:
    """Return the name of a task's unit."""
    return f"twine-task-{task_id}.service"


async def until(
    client: AgentClient, task_id: str, reached: Callable[[api.TaskStatus], bool]
) -> api.TaskStatus:
    """Return the status of a task once it matches. Events of the agent trigger each check."""
    async with asyncio.timeout(60):
        after = (await client.get_events(0)).latest
        while True:
            status = await client.get_task(task_id)
            if reached(status):
                return status
            after = (await client.get_events(after, wait_s=5)).latest


async def running(client: AgentClient, task_id: str) -> api.TaskStatus:
    """Return the status of a task once it runs."""
    return await until(client, task_id, lambda s: s.state is api.TaskState.RUNNING)


async def gone(client: AgentClient, task_id: str) -> None:
    """Return once nothing of a task is left."""
    try:
        await until(client, task_id, lambda _: False)
    except NotFound:
        return
