"""The agent works while its service manager does not answer.

`unit/agent/machine/test_bus.py` shows that other threads run while one waits for the bus.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import FakeHost, a_spec, running, until
from msgspec.structs import replace

from agent import daemon
from agent.api import Health, Probe, TaskState
from agent.machine.fake_systemd import FakeSystemd


class Hung:
    """A service manager that can stop answering; callers wait in a lane of the agent."""

    def __init__(self, systemd: FakeSystemd) -> None:
        self._systemd, self.answers = systemd, threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._systemd, name)

        def call(*args: Any) -> Any:
            assert self.answers.wait(60)
            return found(*args)

        return call


@asynccontextmanager
async def a_server(answer: list[str]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(f"HTTP/1.1 {answer[0]} x\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.behaviour("BUG-AG2")
async def test_a_service_manager_that_hangs_costs_starts_and_nothing_else(
    tmp_path: Path, monkeypatch
) -> None:
    """Health, states, logs, probes and the watchdog keep working; starts wait and succeed later."""
    notified: list[str] = []
    monkeypatch.setattr(daemon, "notify", lambda *words: notified.extend(words))
    monkeypatch.setattr(daemon, "watchdog_s", lambda: 0.03)
    host, answer = FakeHost(tmp_path), ["200"]
    host.give_image()
    host.fake.processes.answers[("journalctl",)] = [b"hello\n"]
    systemd = Hung(host.fake.systemd)
    machine = replace(host.fake.machine, systemd=systemd)
    stop = asyncio.Event()
    async with a_server(answer) as port, host.serving(machine) as (services, client):
        beating = asyncio.ensure_future(daemon._heartbeat(services, stop))
        probe = Probe(port=port, interval_s=0.01, failures=1, start_period_s=0)
        await client.put_task("web", a_spec(probe=probe))
        await until(client, "web", lambda s: s.health is Health.HEALTHY)
        systemd.answers.clear()
        try:
            notified.clear()
            assert (await client.readyz()).ok
            await client.put_task("late", a_spec())
            answer[0] = "500"
            await until(client, "web", lambda s: s.health is Health.UNHEALTHY)
            answer[0] = "200"  # the task's own loop already waits for its unit
            await until(client, "web", lambda s: s.health is Health.HEALTHY)
            assert [line async for line in client.task_logs("web")] == [b"hello\n"]
            assert [t.task_id for t in (await client.list_tasks()).tasks] == ["late", "web"]
            while notified.count("WATCHDOG=1") < 3:
                await asyncio.sleep(0.01)
            assert (await client.get_task("late")).state is not TaskState.RUNNING
        finally:
            systemd.answers.set()
        await running(client, "late")
        stop.set()
        await beating
