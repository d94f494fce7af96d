"""The agent dies at each named point, on a real btrfs; the next one redoes or undoes the step.

The agent dies in a separate process, by `os._exit`, so nothing is cleaned up. The service manager
in memory survives the agent, as PID 1 does: its state at that moment is passed on.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from builders import FakeHost, a_spec, a_tar, chunks_of, digest_of, gone, running, unit
from msgspec.structs import replace
from oci import Layout, Registry, files
from on_btrfs import machine, mounted, use_real_programs

from agent.api import ImageFormat, Volume, VolumeKind
from agent.client import AgentClient
from agent.runtime import crashpoints
from agent.runtime.crashpoints import KILLED, POINTS, arm_from_environment
from wire.errors import ConfigError, Conflict, NotFound

pytestmark = pytest.mark.root

TAR = a_tar(app="code")
IMAGE = digest_of(TAR)
PLACE = "registry.example/team/web:1"
OLD = "registry.example/team/web:0"
Story = Callable[[FakeHost, AgentClient], Awaitable[None]]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a host on btrfs that removes images as soon as they are unused."""
    with mounted(tmp_path) as host:
        registry = Registry()
        host.fake.systemd.programs["skopeo"] = registry.skopeo
        use_real_programs(host, "tar", "find")
        base = files(base="b")
        for place, app in ((PLACE, "1"), (OLD, "0")):
            layout = Layout(tmp_path / f"layout{app}")
            registry.push(place, layout, layout.image(base, files(app=app)))
        host.config = replace(host.config, image_keep_s=0.0)
        yield host


async def put(host: FakeHost, client: AgentClient) -> None:
    await client.put_image(IMAGE, ImageFormat.TAR, chunks_of(TAR))


async def start(host: FakeHost, client: AgentClient) -> None:
    await put(host, client)
    await client.put_task("web", a_spec(image=IMAGE))
    await running(client, "web")


async def stop(host: FakeHost, client: AgentClient) -> None:
    await start(host, client)
    await client.delete_task("web")
    with suppress(NotFound):
        await gone(client, "web")


async def pull(host: FakeHost, client: AgentClient) -> None:
    await client.fetch_oci_image(PLACE)


async def delete(host: FakeHost, client: AgentClient) -> None:
    await put(host, client)
    with suppress(NotFound):
        await client.delete_image(IMAGE)


async def collect(host: FakeHost, client: AgentClient) -> None:
    await client.fetch_oci_image(OLD)
    await client.collect_garbage()


async def keep(host: FakeHost, client: AgentClient) -> None:
    await put(host, client)
    volumes = {
        "data": Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=64 << 20),
        "tmp": Volume(path="/scratch", max_bytes=64 << 20),
    }
    newer = time.time_ns() // 1_000_000
    await client.put_task("web", a_spec(generation=newer, image=IMAGE, volumes=volumes))
    await running(client, "web")
    with suppress(Conflict):
        await client.snapshot_volume("local", "web.data", "before")
    await client.delete_task("web")
    with suppress(NotFound):
        await gone(client, "web")
    with suppress(NotFound):
        await client.remove_volume("local", "web.data")


STORIES: dict[str, Story] = {
    "task": start,
    "prepare": start,
    "start": start,
    "stop": stop,
    "remove-root": stop,
    "forget": stop,
    "image": put,
    "pull": pull,
    "delete": delete,
    "gc": collect,
    "volume": keep,
    "scratch": keep,
}


def dies(host: FakeHost, scenario: Story, point: str) -> int:
    """Run a scenario with an agent that dies at a point; return the exit code of its process."""
    systemd, left = host.fake.systemd, host.folder / "left"
    child = os.fork()
    if child == 0:
        try:

            def die() -> NoReturn:
                left.write_bytes(pickle.dumps((systemd._units, systemd.started)))
                os._exit(KILLED)

            crashpoints.arm(point, die)
            asyncio.run(_play(host, scenario))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if left.exists():
        systemd._units, systemd.started = pickle.loads(left.read_bytes())
    return os.waitstatus_to_exitcode(status)


async def _play(host: FakeHost, scenario: Story) -> None:
    async with host.agent(machine(host)) as client:
        await scenario(host, client)


async def _at_rest(client: AgentClient) -> None:
    """Return when fsck finds no problem: all pending work is done."""
    async with asyncio.timeout(120):
        while any(a.wrong for a in (await client.get_accounts()).accounts):
            pass


@pytest.mark.behaviour("F-01", "F-42")
@pytest.mark.parametrize("point", POINTS)
def test_an_interrupted_step_is_redone_or_undone_and_never_done_twice(
    host: FakeHost, point: str
) -> None:
    """This holds at every point.

    Afterwards all objects have an owner, and the same request works.
    """
    scenario = STORIES[point.partition(".")[0]]

    assert dies(host, scenario, point) == KILLED, f"{point} was not reached"

    async def after() -> None:
        async with host.serving(machine(host)) as (services, client):
            services.accounts.recheck_s = 0.2
            await _at_rest(client)
            assert os.listdir(host.state / "staging") == []
            tasks = {t.task_id for t in (await client.list_tasks()).tasks}
            if scenario is stop and "web" in tasks:  # the task was requested to stop, and it stops
                with suppress(NotFound):
                    await gone(client, "web")
            if scenario is not stop:
                await scenario(host, client)
            await _at_rest(client)
            units = host.units()
            assert units == ([unit("web")] if scenario is start else [])
            most = 2 if scenario is keep else 1  # the request was repeated
            assert host.fake.systemd.started.count(unit("web")) <= most
            assert (await client.list_volumes()).volumes == [] or scenario is keep
            images = {i.digest for i in (await client.list_images()).images}
            assert (IMAGE in images) == (scenario in (start, stop, put, keep))

    asyncio.run(after())


def test_each_story_has_its_points_and_each_point_its_story() -> None:
    assert {point.partition(".")[0] for point in POINTS} == set(STORIES)


def test_a_point_is_armed_by_the_environment_only_where_the_configuration_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TWINE_CRASHPOINT", "nowhere")
    arm_from_environment(False)
    with pytest.raises(ConfigError, match="no crash point 'nowhere'"):
        arm_from_environment(True)
    monkeypatch.setenv("TWINE_CRASHPOINT", "image.stored")
    child = os.fork()
    if child == 0:
        arm_from_environment(True)
        crashpoints.crash_point("image.unpacked")
        crashpoints.crash_point("image.stored")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
