"""Operations of owners on single tasks: through the control plane's service, on a real agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
from builders import FakeHost, a_spec, running

from agent.api import TaskState
from agent.api.exec import ExecEnd
from agent.client import AgentClient
from agent.machine import Property
from agent.machine.fake_systemd import Ended
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskRecord
from control_plane.scheduler.task_service import TaskService
from wire.duplex import Frame
from wire.errors import InvalidInput, NotFound

SPEC = JobSpec(name="web", entitlement="e", tasks=2, image="sha256:" + "1" * 64, command=["/x"])


class Jobs:
    def get(self, name: str) -> JobRecord:
        placed = TaskRecord(index=0, version=1, generation=1, placement=Placement(machine="m1"))
        waits = TaskRecord(index=1, version=1, generation=1, reason="no room")
        return JobRecord(name=name, spec=SPEC, version=1, tasks=[placed, waits])


class Agents:
    def __init__(self, client: AgentClient) -> None:
        self.client = client

    async def agent(self, machine: str) -> AgentClient:
        assert machine == "m1"
        return self.client


class Near:
    """A caller that sends nothing and records the frames that it receives."""

    def __init__(self) -> None:
        self.got: list[Frame] = []

    async def frames(self) -> AsyncIterator[Frame]:
        while not self.got or not isinstance(self.got[-1], str):
            await asyncio.sleep(0.01)
        return
        yield b""

    async def send(self, frame: Frame) -> None:
        self.got.append(frame)


def service_of(client: AgentClient) -> TaskService:
    return TaskService(Jobs(), Agents(client))  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path)
    host.give_image()
    return host


@pytest.mark.behaviour("AG10")
async def test_a_command_inside_a_task_is_carried_through_the_control_plane(
    host: FakeHost,
) -> None:
    def speak(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        Path(str(properties["StandardOutputFile"])).write_bytes(b" ".join(map(str.encode, argv)))
        return Ended(code=4)

    host.fake.systemd.programs["/bin/speak"] = speak
    async with host.agent() as client:
        await client.put_task("web-0", a_spec())
        await running(client, "web-0")
        near = Near()
        talk = await service_of(client).inside("web", 0, {"command": '["/bin/speak", "a b"]'})
        await talk(near)

    assert near.got[0] == b"\x01/bin/speak a b"
    assert msgspec.json.decode(near.got[-1], type=ExecEnd) == ExecEnd(code=4)


async def test_the_agent_refuses_before_anything_is_opened(host: FakeHost) -> None:
    async with host.agent() as client:
        service = service_of(client)
        with pytest.raises(NotFound, match="no task web-0"):
            await service.inside("web", 0, {"command": '["/bin/x"]'})
        with pytest.raises(InvalidInput, match="command"):
            await service.inside("web", 0, {"command": "no list"})
        with pytest.raises(NotFound, match="on no machine: no room"):
            await service.inside("web", 1, {"command": '["/bin/x"]'})


async def test_a_task_is_described_and_restarted_on_its_machine(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web-0", a_spec())
        before = await running(client, "web-0")
        service = service_of(client)
        found = await service.describe("web", 0)
        again = await service.restart("web", 0)

    assert found.status == before
    assert (found.task, found.machine) == ("web-0", "m1")
    assert again.state is TaskState.STOPPING


@pytest.mark.behaviour("BUG-UX72")
def test_an_unknown_task_is_not_reported_as_a_task_without_a_machine():
    """`task describe web-99` reported that the task is on no machine."""
    with pytest.raises(NotFound, match="job 'web' has no task 99"):
        service_of(None)._placed("web", 99)  # type: ignore[arg-type]
