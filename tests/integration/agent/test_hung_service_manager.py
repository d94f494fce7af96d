"""An agent whose service manager answers nothing: the helper that speaks to it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from builders import FakeHost, a_spec, running, until
from msgspec.structs import replace

from agent import daemon
from agent.api import Health, Probe, TaskState
from agent.machine.systemd_apart import ApartSystemd

HELPER = (
    "import socket, sys; from agent.machine.fake_systemd import FakeSystemd; "
    "from agent.machine.systemd_apart import serve; "
    "serve(FakeSystemd(), *(socket.socket(fileno=int(fd)) for fd in sys.argv[1:]))"
)


class Helper:
    """A real process that answers for a service manager in its memory."""

    pid = 0

    def __call__(self, calls: socket.socket, signals: socket.socket) -> Callable[[], None]:
        ends = [str(end.fileno()) for end in (calls, signals)]
        for end in (calls, signals):
            os.set_inheritable(end.fileno(), True)
        self.pid = pid = os.posix_spawn(
            sys.executable, [sys.executable, "-c", HELPER, *ends], os.environ
        )

        def reap() -> None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

        return reap


@asynccontextmanager
async def a_server(answer: list[str]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(f"HTTP/1.1 {answer[0]} x\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_service_manager_that_hangs_costs_starts_and_nothing_else(
    tmp_path: Path, monkeypatch
) -> None:
    """BUG-AG2: health, states, logs, probes and the watchdog go on; starts wait and come."""
    told: list[str] = []
    monkeypatch.setattr(daemon, "notify", lambda *words: told.extend(words))
    monkeypatch.setattr(daemon, "watchdog_s", lambda: 0.03)
    host, helper, answer = FakeHost(tmp_path), Helper(), ["200"]
    host.give_image()
    host.fake.processes.answers[("journalctl",)] = [b"said\n"]
    systemd = ApartSystemd(helper)
    machine = replace(host.fake.machine, systemd=systemd)
    stop = asyncio.Event()
    try:
        async with a_server(answer) as port, host.serving(machine) as (services, client):
            beating = asyncio.ensure_future(daemon._heartbeat(services, stop))
            probe = Probe(port=port, interval_s=0.01, failures=1, start_period_s=0)
            await client.put_task("web", a_spec(probe=probe))
            await until(client, "web", lambda s: s.health is Health.HEALTHY)
            os.kill(helper.pid, signal.SIGSTOP)
            try:
                told.clear()
                assert (await client.readyz()).ok
                await client.put_task("late", a_spec())
                answer[0] = "500"
                await until(client, "web", lambda s: s.health is Health.UNHEALTHY)
                answer[0] = "200"  # the task's own loop waits for its unit by now
                await until(client, "web", lambda s: s.health is Health.HEALTHY)
                assert [line async for line in client.task_logs("web")] == [b"said\n"]
                assert [t.task_id for t in (await client.list_tasks()).tasks] == ["late", "web"]
                while told.count("WATCHDOG=1") < 3:
                    await asyncio.sleep(0.01)
                assert (await client.get_task("late")).state is not TaskState.RUNNING
            finally:
                os.kill(helper.pid, signal.SIGCONT)
            await running(client, "late")
            stop.set()
            await beating
    finally:
        systemd.close()
