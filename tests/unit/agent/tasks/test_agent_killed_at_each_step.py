"""The agent is killed before or after each of its steps; the next agent must recover."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from builders import (
    OTHER_IMAGE,
    FakeHost,
    a_spec,
    a_tar,
    chunks_of,
    digest_of,
    gone,
    running,
    unit,
    until,
)
from msgspec.structs import replace

from agent.api import ImageFormat, TaskState
from agent.client import AgentClient
from agent.machine import HostAccess
from agent.runtime.journal import Journal
from wire.errors import NotFound, TwineError

STEPS = {"start_transient", "stop", "reset_failed", "set_properties"}
STEPS |= {"snapshot", "delete", "create", "set_read_only"}


class Killed(Exception):
    """The agent is dead: its calls have no effect any more."""


class Killer:
    """Runs an agent for a number of steps, then blocks all its later steps."""

    def __init__(self, steps: int, *, before: bool) -> None:
        self.left = steps
        self.before = before
        self.dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._killed = False

    def step(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._killed:
                raise Killed
            self.left -= 1
            self._killed = self.left < 0
        if self._killed:
            if not self.before:
                with suppress(TwineError):
                    call(*args, **kwargs)
            self._loop.call_soon_threadsafe(self.dead.set)
            raise Killed
        return call(*args, **kwargs)

    def machine(self, host: FakeHost) -> HostAccess:
        whole = host.fake.machine
        return replace(whole, systemd=Mortal(self, whole.systemd), btrfs=Mortal(self, whole.btrfs))


class Mortal:
    """An interface of the machine that counts the calls that change the machine."""

    def __init__(self, killer: Killer, real: Any) -> None:
        self._killer = killer
        self._real = real

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._real, name)
        if name not in STEPS:
            return call
        return lambda *args, **kwargs: self._killer.step(call, *args, **kwargs)


Story = Callable[[AgentClient], Awaitable[None]]


async def _play(host: FakeHost, scenario: Story, steps: int, before: bool) -> bool:
    """Run the scenario on an agent that is killed after `steps`; return whether it was killed."""
    killer = Killer(steps, before=before)
    save = Journal.save

    def mortal_save(journal: Journal, *args: Any, **kwargs: Any) -> None:
        killer.step(save, journal, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "save", mortal_save)
        async with host.agent(killer.machine(host)) as client:
            playing = asyncio.ensure_future(scenario(client))
            dying = asyncio.ensure_future(killer.dead.wait())
            await asyncio.wait({playing, dying}, return_when=asyncio.FIRST_COMPLETED)
            for task in (playing, dying):
                task.cancel()
            await asyncio.wait({playing, dying})
            if not killer.dead.is_set():
                playing.result()
    return killer.dead.is_set()


async def _at_every_step(
    tmp_path: Path, scenario: Story, check: Callable[[FakeHost, AgentClient], Awaitable[None]]
) -> int:
    """Repeat the scenario, killed one step later each time; return the number of steps."""
    for before in (True, False):
        for steps in range(100):
            host = FakeHost(tmp_path / f"{'b' if before else 'a'}{steps}")
            host.give_image()
            host.give_image(OTHER_IMAGE)
            killed = await _play(host, scenario, steps, before)
            async with host.agent() as client, asyncio.timeout(10):
                await check(host, client)
            if not killed:
                break
    return steps


async def _put(client: AgentClient) -> None:
    await client.put_task("web", a_spec())
    await running(client, "web")


async def _running_or_none(client: AgentClient) -> bool:
    try:
        await running(client, "web")
    except NotFound:
        return False
    return True


@pytest.mark.behaviour("F-01")
async def test_a_first_start_happens_once_wherever_it_was_interrupted(tmp_path: Path) -> None:
    async def check(host: FakeHost, client: AgentClient) -> None:
        if not await _running_or_none(client):
            assert host.fake.systemd.started == []
            await client.put_task("web", a_spec())
            await running(client, "web")
        assert host.fake.systemd.started == [unit("web")]
        assert (host.units(), host.roots()) == ([unit("web")], ["web"])

    assert await _at_every_step(tmp_path, _put, check) >= 3


@pytest.mark.behaviour("F-01")
async def test_a_changed_image_ends_in_one_unit_of_the_new_one(tmp_path: Path) -> None:
    async def scenario(client: AgentClient) -> None:
        await _put(client)
        old = (await client.get_task("web")).invocation_id
        await client.put_task("web", a_spec(generation=2, image=OTHER_IMAGE))
        await until(
            client, "web", lambda s: s.state is TaskState.RUNNING and s.invocation_id != old
        )

    async def check(host: FakeHost, client: AgentClient) -> None:
        await client.put_task("web", a_spec(generation=2, image=OTHER_IMAGE))
        await until(
            client,
            "web",
            lambda s: (
                s.state is TaskState.RUNNING
                and s.generation == 2
                and s.invocation_id == host.invocation("web")
            ),
        )
        image = host.fake.btrfs.find(host.state / "images" / ("2" * 64))
        root = host.fake.btrfs.find(host.state / "tasks" / "web")
        assert image
        assert root
        assert root.parent_uuid == image.uuid
        assert host.units() == [unit("web")]
        assert len(host.fake.systemd.started) <= 2

    assert await _at_every_step(tmp_path, scenario, check) >= 8


@pytest.mark.behaviour("F-01")
async def test_a_restart_happens_once_wherever_it_was_interrupted(tmp_path: Path) -> None:
    async def scenario(client: AgentClient) -> None:
        await _put(client)
        old = (await client.get_task("web")).invocation_id
        await client.restart_task("web")
        await until(
            client, "web", lambda s: s.state is TaskState.RUNNING and s.invocation_id != old
        )

    async def check(host: FakeHost, client: AgentClient) -> None:
        if await _running_or_none(client):
            status = await until(
                client, "web", lambda s: s.invocation_id == host.invocation("web") != ""
            )
            assert status.restarts == 0
            assert len(host.fake.systemd.started) <= 2

    assert await _at_every_step(tmp_path, scenario, check) >= 7


@pytest.mark.behaviour("F-01")
async def test_a_removed_task_leaves_nothing_wherever_it_was_interrupted(tmp_path: Path) -> None:
    async def scenario(client: AgentClient) -> None:  # P9
        await _put(client)
        await client.delete_task("web")
        await gone(client, "web")

    async def check(host: FakeHost, client: AgentClient) -> None:
        with suppress(NotFound):
            await client.delete_task("web")
        await gone(client, "web")
        assert (host.units(), host.roots()) == ([], [])
        assert len(host.fake.systemd.started) <= 1

    assert await _at_every_step(tmp_path, scenario, check) >= 8


async def test_an_image_is_whole_or_absent_wherever_it_was_interrupted(tmp_path: Path) -> None:
    data = a_tar()
    digest = digest_of(data)

    async def scenario(client: AgentClient) -> None:
        await client.put_image(digest, ImageFormat.TAR, chunks_of(data))

    async def check(host: FakeHost, client: AgentClient) -> None:
        assert list((host.state / "staging").iterdir()) == []
        held = {i.digest for i in (await client.list_images()).images}
        name = digest.removeprefix("sha256:")
        assert (digest in held) == (host.state / "images" / name).exists()
        await client.put_image(digest, ImageFormat.TAR, chunks_of(data))
        assert (host.state / "images" / name / "hello").read_text() == "world"

    assert await _at_every_step(tmp_path, scenario, check) >= 3
