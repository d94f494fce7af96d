"""Programs for ports exist before a task's unit starts, and running tasks are gated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, gone, running, until

from agent.api import Network, NetworkMode, TaskSpec, TaskState
from agent.machine.fake_network import FakeNetwork
from agent.netd import set_gates
from agent.netplan import Gates
from agent.network import port_gates
from agent.network.port_gates import PortGates
from agent.runtime.core.slices import cgroup_of
from agent.runtime.offload import Lanes
from wire.errors import HostError

WEB = a_spec(network=Network(ports={"http": 8080, "admin": 81}))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_gates, "SETTLE_S", 0.0)
    monkeypatch.setattr(port_gates, "RETRY_S", 0.01)


async def seen(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


@pytest.mark.behaviour("BUG-AG10")
async def test_the_program_is_there_before_the_unit_and_the_task_is_held_once_it_runs(
    tmp_path: Path,
) -> None:
    """systemd continues if a program is missing, and detaches the program at a reload."""
    host = FakeHost(tmp_path)
    host.give_image()
    network = host.fake.network
    early: list[set[str]] = []
    start = host.fake.systemd.start_transient

    def started(unit: str, properties: dict[str, object]) -> None:
        early.append(network.gates())
        start(unit, properties)

    host.fake.systemd.start_transient = started  # type: ignore[method-assign,assignment]
    async with host.agent() as client:
        await client.put_task("web", WEB)
        await running(client, "web")
        await seen(lambda: network.held == {cgroup_of("web", WEB): [81, 8080]})
        assert early
        assert all("81-8080" in gates for gates in early)

        network.held.clear()
        await client.restart_task("web")
        await seen(lambda: bool(network.held))


@pytest.mark.behaviour("F-02")
async def test_running_tasks_are_held_again_when_the_agent_starts(tmp_path: Path) -> None:
    """An agent may die before it sends the request, and an earlier release gated no task."""
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        await client.put_task("web", WEB)
        await running(client, "web")
    network = host.fake.network
    network.held.clear()
    network.ports.clear()

    async with host.agent():
        await seen(lambda: network.held == {cgroup_of("web", WEB): [81, 8080]})
        assert network.gates() == {"none", "81-8080"}


async def test_a_task_whose_port_gate_cannot_be_made_does_not_start(tmp_path: Path) -> None:
    """Otherwise the task could bind any port, without an error."""
    host = FakeHost(tmp_path)
    host.give_image()
    host.fake.network.broken = "cannot store the port programs"
    async with host.agent() as client:
        await client.put_task("web", WEB)
        waiting = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)
        assert "cannot store the port programs" in waiting.reason
        assert host.units() == []
        host.fake.network.broken = ""
        await running(client, "web")


async def test_a_task_with_a_private_network_binds_any_port(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.give_image()
    async with host.agent() as client:
        await client.put_task("web", a_spec(network=Network(mode=NetworkMode.PRIVATE)))
        await running(client, "web")
        await client.delete_task("web")
        await gone(client, "web")
    assert host.fake.network.ports == host.fake.network.held == {}


class Lying(FakeNetwork):
    """Reports that it made programs, and makes none."""

    def has_gate(self, name: str) -> bool:
        return False


async def test_created_objects_are_searched() -> None:
    lanes = Lanes()
    with pytest.raises(HostError, match="was created but does not exist"):
        await PortGates(Lying(), lanes).ensure("web", WEB)
    lanes.close()


async def test_programs_of_removed_tasks_are_removed_by_the_next_request() -> None:
    network, lanes = FakeNetwork(), Lanes()
    gates = PortGates(network, lanes)
    await gates.ensure("web", WEB)
    gates.forget("web")
    await gates.ensure("db", _with(5432))
    lanes.close()

    assert network.gates() == {"none", "5432"}


async def test_while_a_record_cannot_be_read_no_port_gate_is_removed() -> None:
    """Its task may run, and systemd opens its program again at a reload."""
    network, lanes = FakeNetwork(), Lanes()
    await PortGates(network, lanes).ensure("web", WEB)
    later = PortGates(network, lanes)
    later.expect({}, ["web"])
    await later.ensure("db", _with(5432))
    lanes.close()

    assert network.gates() == {"none", "81-8080", "5432"}


@pytest.mark.parametrize("cgroup", ["/system.slice/ssh.service", "/workload.slice/../x", "x"])
def test_only_cgroups_of_tasks_are_touched(cgroup: str) -> None:
    """The path is checked although only authorized callers can send it."""
    with pytest.raises(HostError, match="is not the cgroup of a task"):
        set_gates(Gates(wanted=[], alone=False, hold={cgroup: [80]}))


def _with(port: int) -> TaskSpec:
    return a_spec(network=Network(ports={"main": port}))
