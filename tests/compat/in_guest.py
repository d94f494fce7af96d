"""Runs images in the guest and prints a line of JSON for each.

    /opt/twine/bin/python in_guest.py REGISTRY RECIPES NAME…

This process calls the agent as `twine-agent` does. One Python process serves all calls, because
starting Python takes an emulated processor seconds.
"""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from agent import api
from agent.api.exec import ExecEnd, ExecWord
from agent.cli.task_options import checked_spec
from agent.client import AgentClient
from agent.config import load, local_socket
from wire import units
from wire.errors import TwineError
from wire.quantity_fields import parse_quantities

READY_S, STOP_S, PULL_FREE_BYTES = 600.0, 30, 1500 << 20
"""Generous, because the guest's processors are emulated and may be shared."""
AT_ONCE = 2
"""Number of images that are tested at one time. Most of a test is waiting."""


class Unfit(Exception):
    """An image does not behave as its recipe expects."""


class Trial:
    """One image as a task of this host."""

    def __init__(self, client: AgentClient, recipe: dict[str, Any], found: dict[str, Any]) -> None:
        self._client, self._recipe, self._name = client, recipe, recipe["name"]
        self._found, self._put_at = found, 0.0

    async def talk(self) -> str:
        """Return what the task's port answers."""
        at = (await self._client.get_task(self._name)).addresses[-1]
        reader, writer = await asyncio.open_connection(at, self._recipe["port"])
        try:
            writer.write(self._recipe["send"].encode())
            received = b""
            while self._recipe["expect"].encode() not in received:
                if not (data := await reader.read(65536)):
                    break
                received += data
        finally:
            writer.close()
        return received.decode(errors="replace")

    async def inside(self, command: str, *, must: bool = False) -> str:
        """Return the output of a command in the task. With `must`, raise if the command fails."""
        words = ["/bin/sh", "-c", command]
        received = b""
        async with self._client.exec_task(self._name, words, tty=False) as duplex:
            await duplex.send(msgspec.json.encode(ExecWord(end_of_input=True)).decode())
            async for frame in duplex.frames():
                if isinstance(frame, str):
                    end = msgspec.json.decode(frame, type=ExecEnd)
                    if must and end.code != 0:
                        raise Unfit(
                            f"{command!r} fails: {received.decode(errors='replace')[-200:]!r}"
                        )
                    break
                received += frame[1:]
        return received.decode(errors="replace")

    async def logs(self, tail: int | None = None) -> str:
        chunks = [chunk async for chunk in self._client.task_logs(self._name, tail=tail)]
        return b"".join(chunks).decode(errors="replace")

    async def start(self, digest: str) -> None:
        recipe = self._recipe
        keys = tomllib.loads(recipe["keys"])
        volumes = {"data": {"kind": "persistent", "path": recipe["data"]}}
        document = {
            "image": digest,
            "generation": time.time_ns() // 1_000_000,
            "limits": {"memory_max_bytes": units.size(recipe["memory"])},
            "network": {"mode": "private"},
            "stop_timeout_s": STOP_S,
            **({"volumes": volumes} if recipe["data"] else {}),
            **parse_quantities(keys, api.TaskSpec),
        }
        self._put_at = time.monotonic()
        await self._client.put_task(self._name, checked_spec(document))

    async def serve(self) -> None:
        """Return once the task serves. Raise if it does not within the limit."""
        recipe, received, before = self._recipe, "", None
        late, wait_s = time.monotonic() + READY_S, 2.0
        while time.monotonic() < late:
            task = await self._client.get_task(self._name)
            before = task.restarts if before is None else before
            if task.state is api.TaskState.FAILED or task.restarts > before + 1:
                last = api.exit_text(task.last_exit) if task.last_exit else ""
                raise Unfit(f"it ended: {task.reason or last}")
            running = task.state is api.TaskState.RUNNING
            if running:
                self._found.setdefault("start_s", round(time.monotonic() - self._put_at, 1))
            if running and not (recipe["ask"] and recipe["logs"] not in await self.logs()):
                try:
                    async with asyncio.timeout(120):
                        received = await (
                            self.inside(recipe["ask"]) if recipe["ask"] else self.talk()
                        )
                except (OSError, IndexError, TimeoutError, TwineError) as e:
                    received = f"{type(e).__name__}: {e}"
                if recipe["expect"] in received:
                    return
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, 6.0)  # each request is work for the guest
        raise Unfit(f"it does not serve: {received.strip()[-300:]!r}")

    async def check_log(self) -> None:
        late = time.monotonic() + 60.0
        while self._recipe["logs"] not in await self.logs():
            if time.monotonic() > late:
                raise Unfit(f"its log has no {self._recipe['logs']!r}")
            await asyncio.sleep(1.0)

    async def has_kept(self) -> None:
        """Return once a command in the task finds what was written. Raise if it does not within the
        limit."""
        received, late = "", time.monotonic() + READY_S
        while self._recipe["kept"] not in received:
            if time.monotonic() > late:
                raise Unfit(f"it lost its data: {received.strip()[-200:]!r}")
            await asyncio.sleep(2.0)
            try:
                async with asyncio.timeout(300):
                    received = await self.inside(self._recipe["read"])
            except (TimeoutError, TwineError) as e:  # the task does not run yet
                received = f"{type(e).__name__}: {e}"

    async def again(self) -> None:
        """Stop and start the task. Return once it has started again."""
        before = (await self._client.get_task(self._name)).invocation_id
        await self._client.restart_task(self._name)
        late = time.monotonic() + STOP_S + 240
        while (await self._client.get_task(self._name)).invocation_id in ("", before):
            if time.monotonic() > late:
                raise Unfit("it is not started again")
            await asyncio.sleep(0.5)

    async def gone(self) -> None:
        task = await self._client.get_task(self._name)
        await self._client.delete_task(self._name, generation=task.generation + 1)
        while any(t.task_id == self._name for t in (await self._client.list_tasks()).tasks):
            await asyncio.sleep(1.0)


def was_killed(name: str, since: float) -> bool:
    """Return whether systemd had to kill remaining processes of a task after its stop timeout."""
    unit = f"twine-task-{name}.service"
    words = ["journalctl", "--no-pager", "-q", "-o", "cat", f"--since=@{since:.0f}", "-u", unit]
    return b"timed out. Killing" in subprocess.run(words, capture_output=True, check=True).stdout


async def attempt(
    client: AgentClient, trial: Trial, recipe: dict[str, Any], registry: str, found: dict[str, Any]
) -> None:
    async def timed(what: str, act: Callable[[], Awaitable[Any]]) -> Any:
        began = time.monotonic()
        try:
            return await act()
        finally:
            found[f"{what}_s"] = round(time.monotonic() - began, 1)

    began = time.time()
    reference = f"{registry}/compat:{recipe['name']}"
    info = await timed("pull", lambda: client.fetch_oci_image(reference))
    found["digest"] = info.digest

    async def up() -> None:
        await trial.start(info.digest)
        await trial.serve()

    await timed("ready", up)
    found["serves"] = True
    await trial.check_log()
    found["logs"] = True
    if recipe["write"]:
        await trial.inside(recipe["write"], must=True)
        await trial.again()
        await trial.has_kept()
        found["keeps"] = True
    await timed("stop", trial.gone)
    if was_killed(recipe["name"], began):
        raise Unfit(f"it does not stop within {STOP_S} s by its signal")
    found["stops"] = True


async def one(client: AgentClient, registry: str, recipe: dict[str, Any]) -> dict[str, Any]:
    name, found, began = recipe["name"], {"name": recipe["name"]}, time.monotonic()
    trial = Trial(client, recipe, found)
    try:
        await attempt(client, trial, recipe, registry, found)
    except (Unfit, TwineError, OSError, TimeoutError) as e:
        found["problem"] = f"{type(e).__name__}: {e}"
        found["output"] = (await trial.logs(tail=15))[-2000:]
    if any(t.task_id == name for t in (await client.list_tasks()).tasks):
        await trial.gone()
    if any(v.name == f"{name}.data" for v in (await client.list_volumes()).volumes):
        await client.remove_volume("local", f"{name}.data")
    if (await client.get_machine()).disk_free_bytes < PULL_FREE_BYTES and "digest" in found:
        await client.delete_image(found["digest"])
    found["took_s"] = round(time.monotonic() - began, 1)
    return found


async def main(registry: str, recipes: str, *names: str) -> None:
    table = {recipe["name"]: recipe for recipe in json.loads(Path(recipes).read_text())}
    waiting = list(names or table)

    async def next_ones(client: AgentClient) -> None:
        while waiting:
            found = await one(client, registry, table[waiting.pop(0)])
            print(json.dumps({**found, "kernel": platform.release()}), flush=True)

    async with AgentClient(local_socket(load(None))) as client, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(next_ones(client))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
