"""Tasks get notices in advance, in a file and by their hook, across restarts of the agent."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from builders import FakeHost, a_record, a_spec, gone, running, unit
from msgspec.structs import replace

from agent.api import Life, TaskSpec, TaskState
from agent.api.notices import HostNotice, HostNotices, LentCapacity, NoticeSettings
from agent.notices import notices as module
from agent.notices.core import pause_s
from agent.runtime.core.records import TaskRecord, key_of
from agent.runtime.offload import Lanes
from wire.errors import Conflict

pytestmark = pytest.mark.behaviour("EL9")

REVOKED = HostNotice(id="m1-revoked-1", kind="revoked", start=100.0, deadline=220.0, reason="peak")
ABSENT = LentCapacity(entitlement="batch", state="absent", wanted=3)
OTHER = LentCapacity(entitlement="other", state="full", machines=1)
NOTICES = HostNotices(notices=[REVOKED], capacity=[ABSENT, OTHER])


def noticed(**fields: Any) -> TaskSpec:
    return a_spec(life=Life(notice=NoticeSettings(**fields)))


def folder(host: FakeHost) -> Path:
    return Path(host.config.run_dir) / "notices"


def file_of(host: FakeHost, task: str) -> Any:
    return json.loads((folder(host) / task / "notice.json").read_bytes())


async def until(holds: Callable[[], object]) -> None:
    """Return when a condition holds; fail after a timeout."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


class HookServer:
    """A server of a task, on the port of its hook."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.status = 200
        self.hangs = False

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        if self.hangs:
            await asyncio.Event().wait()
        return web.Response(status=self.status)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_post("/notice", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


@pytest.mark.behaviour("EL9")
async def test_a_task_reads_planned_events_in_a_read_only_file(host: FakeHost) -> None:
    """The folder is mounted read only, and the file is replaced, never written in place."""
    async with host.agent() as client:
        await client.put_task("web", noticed(capacity_of=["batch"]))
        await client.put_task("plain", a_spec())
        await running(client, "plain")
        await running(client, "web")
        assert file_of(host, "web") == {"notices": [], "capacity": []}
        before = os.stat(folder(host) / "web" / "notice.json")
        await client.put_notices(NOTICES)
        await until(lambda: file_of(host, "web")["notices"])
    found = file_of(host, "web")
    assert found["notices"][0]["deadline"] == 220.0
    assert [c["entitlement"] for c in found["capacity"]] == ["batch"]
    after = os.stat(folder(host) / "web" / "notice.json")
    assert before.st_ino != after.st_ino
    assert stat.S_IMODE(after.st_mode) == 0o444
    properties = host.fake.systemd.properties(unit("web"))
    assert properties["BindReadOnlyPaths"] == [f"{folder(host)}/web:/run/twine-notice"]
    assert "TWINE_NOTICE=/run/twine-notice/notice.json" in properties["Environment"]
    assert not (folder(host) / "plain").exists()
    assert "BindReadOnlyPaths" not in host.fake.systemd.properties(unit("plain"))


async def test_notices_outlive_the_agent_and_go_with_the_task(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_notices(NOTICES)
    async with host.agent() as client:
        await client.put_task("web", noticed())
        await running(client, "web")
        assert [n["id"] for n in file_of(host, "web")["notices"]] == [REVOKED.id]
        await client.put_notices(HostNotices())
        await until(lambda: not file_of(host, "web")["notices"])
        await client.delete_task("web")
        await gone(client, "web")
        assert not (folder(host) / "web").exists()


@pytest.mark.behaviour("EL9")
async def test_a_hook_is_called_once_and_again_only_for_new_notices(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new agent does not repeat an accepted notice; it repeats a refused one."""
    monkeypatch.setattr(module, "CHECK_S", 0.02)
    monkeypatch.setattr(module, "pause_s", lambda _: 0.02)
    hook = HookServer()
    async with hook.serving() as port:
        async with host.agent() as client:
            await client.put_task("web", noticed(port=port, path="/notice"))
            await running(client, "web")
            hook.status = 503
            await client.put_notices(NOTICES)
            await until(lambda: len(hook.bodies) >= 3)
            hook.status = 200
            notified = folder(host) / ".told-web"
            await until(notified.exists)
        assert {body["notices"][0]["id"] for body in hook.bodies} == {REVOKED.id}
        known = len(hook.bodies)
        async with host.agent() as client:
            await running(client, "web")
            later = replace(NOTICES, notices=[replace(REVOKED, deadline=200.0)])
            await client.put_notices(later)
            await until(lambda: len(hook.bodies) > known)
        assert [body["notices"][0]["deadline"] for body in hook.bodies[known:]] == [200.0]


async def test_a_task_that_starts_while_something_is_planned_gets_a_notice(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.02)
    hook = HookServer()
    async with hook.serving() as port, host.agent() as client:
        await client.put_notices(NOTICES)
        await client.put_task("web", noticed(port=port, path="/notice"))
        await until(lambda: hook.bodies)
        # no process listens there: nothing is blocked
        await client.put_task("deaf", noticed(port=1))
        await running(client, "deaf")
    assert hook.bodies[0]["notices"][0]["id"] == REVOKED.id


async def test_notices_of_an_older_term_are_refused(host: FakeHost) -> None:
    service = module.TaskNotices(folder(host), Lanes())
    await service.put(HostNotices(epoch=7, notices=[REVOKED]))
    with pytest.raises(Conflict, match="term 7 is known"):
        await service.put(HostNotices(epoch=6))
    again = module.TaskNotices(folder(host), Lanes())
    with pytest.raises(Conflict):
        await again.put(HostNotices(epoch=6))


async def test_a_damaged_file_of_an_earlier_agent_is_no_obstacle(host: FakeHost) -> None:
    folder(host).mkdir(parents=True)
    (folder(host) / ".host.json").write_bytes(b"{")
    async with host.agent() as client:
        await client.put_task("web", noticed())
        await running(client, "web")
        assert file_of(host, "web") == {"notices": [], "capacity": []}


def test_the_unit_depends_only_on_whether_notices_are_requested() -> None:
    """Another hook, or another capacity to report, restarts nothing."""
    plain, with_notices = key_of(a_spec()), key_of(noticed())
    assert plain != with_notices
    assert key_of(noticed(port=80, capacity_of=["batch"])) == with_notices


def test_pauses_between_calls_of_a_hook_are_bounded() -> None:
    assert [pause_s(n) for n in (1, 2, 3, 6, 1000)] == [1.0, 2.0, 4.0, 30.0, 30.0]


async def test_a_call_that_is_given_up_ends(host: FakeHost) -> None:
    """A call to a hook that never answers does not outlive the agent."""

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    app = web.Application()
    app.router.add_post("/", never)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with host.agent() as client:
            await client.put_notices(NOTICES)
            await client.put_task("web", noticed(port=port, timeout_s=60.0))
            await running(client, "web")
            await until(lambda: file_of(host, "web")["notices"])
    finally:
        await runner.cleanup()
    assert not (folder(host) / ".told-web").exists()


@asynccontextmanager
async def delivering(host: FakeHost, tasks: dict[str, TaskRecord]) -> AsyncIterator[None]:
    """Deliver `NOTICES` to these tasks."""
    lanes = Lanes()
    service = module.TaskNotices(folder(host), lanes)
    await service.put(NOTICES)
    watching = asyncio.create_task(service.watch(lambda: tasks))
    try:
        yield
    finally:
        assert not watching.done()
        watching.cancel()
        await asyncio.wait([watching])
        lanes.close()


def hooked(name: str, port: int) -> TaskRecord:
    spec = noticed(port=port, path="/notice", timeout_s=600.0)
    return a_record(task_id=name, spec=spec, state=TaskState.RUNNING)


@pytest.mark.behaviour("BUG-AG60")
async def test_hooks_that_hang_do_not_delay_the_others(host: FakeHost) -> None:
    """A client of aiohttp has at most 100 connections by default."""
    hanging, hook = HookServer(), HookServer()
    hanging.hangs = True
    async with hanging.serving() as dead, hook.serving() as port:
        tasks = {name: hooked(name, dead) for name in (f"dead-{n}" for n in range(101))}
        async with delivering(host, tasks | {"web": hooked("web", port)}):
            await until((folder(host) / ".told-web").exists)
            await until(lambda: len(hanging.bodies) == len(tasks))


@pytest.mark.behaviour("BUG-AG61")
@pytest.mark.parametrize("damaged", ["broken", ".told-broken/x"])
async def test_a_file_that_cannot_be_written_delays_no_other_task(
    host: FakeHost, damaged: str
) -> None:
    path = folder(host) / damaged
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    hook = HookServer()
    async with hook.serving() as port:
        tasks = {name: hooked(name, port) for name in ("broken", "web")}
        async with delivering(host, tasks):
            await until((folder(host) / ".told-web").exists)
    assert not (folder(host) / ".told-broken").is_file()


async def test_an_ended_task_is_not_called(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task may listen on its port by then."""
    monkeypatch.setattr(module, "CHECK_S", 0.02)
    monkeypatch.setattr(module, "pause_s", lambda _: 0.02)
    hook, other = HookServer(), HookServer()
    hook.status = 503
    async with hook.serving() as port, other.serving() as port2:
        tasks = {"web": hooked("web", port)}
        async with delivering(host, tasks):
            await until(lambda: hook.bodies)
            tasks["web"] = replace(tasks["web"], state=TaskState.BACKOFF)
            tasks["other"] = hooked("other", port2)
            await until(lambda: other.bodies)
            calls = len(hook.bodies)
            other.status = 503
            tasks["third"] = hooked("third", port2)
            await until(lambda: len(other.bodies) > 10)
            assert len(hook.bodies) <= calls + 1
