"""Runs in a guest: tasks start and end while D-Bus and process 1 are disturbed.

Prints JSON: how many tasks started and ended, what the agent's API answered meanwhile, and which of
the permanent tasks have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine

from agent import api
from agent.client import AgentClient
from wire.errors import NotFound

SOCKET = "unix:/run/twine/agent.sock"
STAYING = ("stay-1", "stay-2", "stay-3")
AFTERWARDS = 2
"""Number of tasks that have to start and end after each disturbance."""
BLOCKED_S = 40.0
"""How long D-Bus is blocked: longer than the timeout of a call on it (25 s)."""
PAUSE_S = 0.2


class Load:
    """One task that starts and ends repeatedly, and one client that polls the agent's health."""

    def __init__(self, image: str) -> None:
        self.image, self.cycles, self.requests, self.slowest_s = image, 0, 0, 0.0
        self.is_over, self.ended = False, asyncio.Event()

    def spec(self, generation: int) -> api.TaskSpec:
        return api.TaskSpec(
            image=self.image,
            command=["/bin/busybox", "sleep", "100000"],
            generation=generation,
            limits=api.Limits(memory_max_bytes=16 << 20),
        )

    async def running(self, client: AgentClient, task: str) -> api.TaskStatus:
        while (found := await client.get_task(task)).state is not api.TaskState.RUNNING:
            await asyncio.sleep(PAUSE_S)
        return found

    async def start_and_stop(self) -> None:
        async with AgentClient(SOCKET, timeout_s=300.0) as client:
            while not self.is_over:
                await client.put_task("comes", self.spec(self.cycles + 1))
                await self.running(client, "comes")
                await client.delete_task("comes")
                with contextlib.suppress(NotFound):
                    while True:
                        await client.get_task("comes")
                        await asyncio.sleep(PAUSE_S)
                self.cycles += 1
        self.ended.set()

    async def ask(self) -> None:
        async with AgentClient(SOCKET, timeout_s=300.0) as client:
            while True:
                began = time.monotonic()
                await client.readyz()
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.requests += 1
                await asyncio.sleep(PAUSE_S)

    async def end(self) -> None:
        """Stop after a complete cycle, as a cancelled request may still be carried out later."""
        self.is_over = True
        await self.ended.wait()

    async def more(self, cycles: int) -> None:
        wanted = self.cycles + cycles
        while self.cycles < wanted:
            await asyncio.sleep(PAUSE_S)


@contextlib.asynccontextmanager
async def going(*work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run coroutines while the body runs; if one fails, the body and all others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


async def blocked(load: Load) -> int:
    """Block D-Bus for a while; return what the agent's API answered meanwhile."""
    client = await asyncio.create_subprocess_exec(
        *("systemctl", "show", "-P", "MainPID", "dbus.service"), stdout=asyncio.subprocess.PIPE
    )
    pid, before = int((await client.communicate())[0]), load.requests
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(BLOCKED_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    return load.requests - before


async def main(image: str) -> None:
    """Disturb, wait until tasks start and end as before, and print the result."""
    load = Load(image)
    async with AgentClient(SOCKET, timeout_s=300.0) as client:
        for name in STAYING:
            await client.put_task(name, load.spec(1))
        before = {name: await load.running(client, name) for name in STAYING}
        async with going(load.start_and_stop(), load.ask()):
            await load.more(AFTERWARDS)
            for verb in (["restart", "dbus.service"], ["daemon-reexec"], ["daemon-reload"]):
                doing = await asyncio.create_subprocess_exec("systemctl", *verb)
                assert await doing.wait() == 0, verb
                await load.more(AFTERWARDS)
            answered = await blocked(load)
            await load.more(AFTERWARDS)
            await load.end()
        after = {name: await client.get_task(name) for name in STAYING}
    changed = [
        name
        for name in STAYING
        if (after[name].state, after[name].invocation_id, after[name].restarts)
        != (api.TaskState.RUNNING, before[name].invocation_id, 0)
    ]
    found = {
        "cycles": load.cycles,
        "asked": load.requests,
        "slowest_s": round(load.slowest_s, 2),
        "answered_while_blocked": answered,
        "changed": changed,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
