"""A bound task on a machine in memory: how agent, fence and control plane react to silence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import FakeHost, a_spec, running, unit, until

from agent import fence
from agent.api import Disconnect, DisconnectPolicy, TaskState
from agent.api.term import OWNER_HEADER
from agent.client import AgentClient
from agent.host import callers
from agent.lease.contact import Contact
from wire.errors import Busy, Conflict, HostError, Unprocessable
from wire.fairness import Peer

STOP = Disconnect(policy=DisconnectPolicy.STOP, after_s=30.0)
REASON = "its host had no contact with the control plane for 30 s, the limit of its job"


@dataclass
class Uptime:
    """A clock that only tests move."""

    now_s: float = 5000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def uptime(host: FakeHost) -> Uptime:
    uptime = Uptime()
    host.fake.boottime_s = uptime
    return uptime


def _folder(host: FakeHost) -> Path:
    return Path(host.config.run_dir) / "fence"


def _fence(host: FakeHost, uptime: Uptime) -> list[str]:
    """Run one check of the fence; return the units that it killed."""
    killed: list[str] = []

    def kill(name: str) -> bool:
        if not any(state.main_pid for state in host.fake.systemd.units(name)):
            return False
        host.fake.systemd.kill(name, 9)
        killed.append(name)
        return True

    folder = _folder(host)
    folder.mkdir(parents=True, exist_ok=True)
    fence.check(folder, uptime(), kill)
    return killed


def _wake(host: FakeHost) -> None:
    """Make the agent check all tasks, as their timers would if the clock were real."""
    host.fake.systemd.lose_bus()


@contextmanager
def _as(monkeypatch: pytest.MonkeyPatch, role: str) -> Iterator[None]:
    """Make the callers of the socket the control plane, or a user of the host."""
    with monkeypatch.context() as patch:
        if role == "component":
            patch.setattr(callers, "local_user", lambda _: None)
            peer = Peer(name="spiffe://c/component/cp", role="component")
            patch.setattr(callers, "tls_peer", lambda *_: peer)
        yield


@pytest.fixture
def component(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with _as(monkeypatch, "component"):
        yield


async def _start(host: FakeHost, uptime: Uptime, client: AgentClient, **fields: Any) -> None:
    """Start a bound task as a control plane does: poll for events, then put the task."""
    _fence(host, uptime)
    await client.get_events(0)
    await client.put_task("web", a_spec(disconnect=STOP, **fields))
    await running(client, "web")


@pytest.mark.usefixtures("component")
async def test_a_task_ends_when_its_control_plane_falls_silent_and_reports_why(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
        uptime.now_s += 31
        _wake(host)
        status = await until(client, "web", lambda s: s.state is TaskState.STOPPED)

        assert status.reason == REASON
        assert status.last_exit
        assert status.last_exit.result == "cut-off"
        assert host.units() == []


@pytest.mark.usefixtures("component")
async def test_it_runs_for_as_long_as_answers_arrive(host: FakeHost, uptime: Uptime) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
        for _ in range(10):
            uptime.now_s += 14
            assert _fence(host, uptime) == []
            await client.get_events(0)
            _wake(host)
        assert (await client.get_task("web")).state is TaskState.RUNNING
        assert host.fake.systemd.started == [unit("web")]


@pytest.mark.usefixtures("component")
async def test_answers_that_are_lost_count_for_nothing(host: FakeHost, uptime: Uptime) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
        for _ in range(3):
            uptime.now_s += 10.5
            async with AgentClient(f"unix:{host.config.socket}") as deaf:
                await deaf.get_events(0)
        _wake(host)
        status = await until(client, "web", lambda s: s.state is TaskState.STOPPED)
        assert status.reason == REASON


async def test_a_request_from_the_host_itself_is_no_contact_with_the_control_plane(
    host: FakeHost, uptime: Uptime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.agent() as client:
        with _as(monkeypatch, "component"):
            await _start(host, uptime, client)
        for _ in range(3):
            uptime.now_s += 10.5
            await client.get_events(0)
            await client.readyz()
            await client.list_tasks()
        _wake(host)
        assert (await until(client, "web", lambda s: s.state is TaskState.STOPPED)).reason == REASON
        with pytest.raises(Unprocessable, match="would be ended at once"):
            await client.put_task("other", a_spec(disconnect=STOP))


@pytest.mark.behaviour("SH3")
@pytest.mark.usefixtures("component")
async def test_an_earlier_owner_of_an_entitlement_starts_and_stops_nothing(host: FakeHost) -> None:
    """This includes a task or an image that is unknown to the host."""
    socket = f"unix:{host.config.socket}"
    async with host.agent(), AgentClient(socket) as new, AgentClient(socket) as old:
        new.headers, old.headers = lambda: {OWNER_HEADER: "web/7"}, lambda: {OWNER_HEADER: "web/6"}
        await old.put_task("web", a_spec(epoch=6))
        await new.get_events(0)
        with pytest.raises(Conflict, match=r"term 6 .* of entitlement web is older than 7"):
            await old.put_task("other", a_spec(epoch=6))
        with pytest.raises(Conflict, match="the term of its present owner"):
            await old.delete_task("web", 1, 6)
        assert [task.task_id for task in (await old.list_tasks()).tasks] == ["web"]
        await new.put_task("other", a_spec(epoch=7))


@pytest.mark.behaviour("F-43")
@pytest.mark.usefixtures("component")
async def test_requests_of_an_older_term_do_not_count_as_contact(
    host: FakeHost, uptime: Uptime
) -> None:
    """A leader that was stopped and continued does not prolong the lease."""
    socket = f"unix:{host.config.socket}"
    async with host.agent(), AgentClient(socket) as new, AgentClient(socket) as old:
        new.epoch = lambda: 7
        await _start(host, uptime, new, epoch=7)
        await old.get_events(0)
        for _ in range(3):
            uptime.now_s += 10.5
            await old.get_events(0)
        _wake(host)
        with pytest.raises(Conflict, match="epoch 6 is older than 7"):
            await old.put_task("other", a_spec(disconnect=STOP, epoch=6))
        assert (await until(new, "web", lambda s: s.state is TaskState.STOPPED)).reason == REASON


@pytest.mark.behaviour("BUG-AG74")
def test_a_term_that_could_not_be_written_is_written_at_its_next_request(tmp_path: Path) -> None:
    contact = Contact(tmp_path / "fence", "boot", lambda: 1.0)
    obstacle = tmp_path / "fence" / ".new.epoch"
    obstacle.mkdir()
    with pytest.raises(HostError, match="cannot write"):
        contact.record_contact("", 7)
    assert contact.term == 0
    obstacle.rmdir()
    contact.record_contact("", 7)
    assert contact.term == 7
    assert Contact(tmp_path / "fence", "boot", lambda: 1.0).term == 7


@pytest.mark.usefixtures("component")
async def test_the_fence_ends_a_task_of_a_dead_agent_and_the_next_agent_reports_why(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
    uptime.now_s += 41
    assert _fence(host, uptime) == []
    uptime.now_s += 1
    assert _fence(host, uptime) == [unit("web")]
    async with host.agent() as client:
        await client.get_events(0)
        await client.get_events(0)
        status = await until(client, "web", lambda s: s.state is TaskState.STOPPED)
        assert status.reason == REASON
        assert host.fake.systemd.started == [unit("web")]

        await client.put_task("web", a_spec(disconnect=STOP, generation=2))
        _fence(host, uptime)
        await running(client, "web")
        assert _fence(host, uptime) == []


@pytest.mark.usefixtures("component")
async def test_a_quick_restart_of_the_agent_neither_ends_it_nor_gives_it_more_time(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
    uptime.now_s += 29
    async with host.agent() as client:
        assert (await client.get_task("web")).state is TaskState.RUNNING
        uptime.now_s += 1
        _wake(host)
        await until(client, "web", lambda s: s.state is TaskState.STOPPED)


@pytest.mark.usefixtures("component")
async def test_a_command_without_a_late_answer_behind_it_is_refused(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.agent() as client:
        with pytest.raises(Busy, match="an answer of this host in the last 30 s"):
            await client.put_task("web", a_spec(disconnect=STOP))
        await client.get_events(0)
        uptime.now_s += 30
        with pytest.raises(Busy, match="an answer of this host in the last 30 s"):
            await client.put_task("web", a_spec(disconnect=STOP))
        await client.put_task("plain", a_spec())
        await running(client, "plain")


@pytest.mark.usefixtures("component")
async def test_without_a_fence_nothing_is_started_that_needs_it(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.agent() as client:
        await client.get_events(0)
        await client.put_task("web", a_spec(disconnect=STOP))
        status = await until(client, "web", lambda s: s.state is TaskState.BACKOFF)
        assert "twine-fence.service does not run" in status.reason
        _fence(host, uptime)
        uptime.now_s += 1
        _wake(host)
        await running(client, "web")


@pytest.mark.usefixtures("component")
async def test_a_relaxation_is_removed_without_a_restart(host: FakeHost, uptime: Uptime) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
        await client.put_task("web", a_spec(generation=2))
        uptime.now_s += 1000
        _wake(host)
        assert _fence(host, uptime) == []
        assert (await client.get_task("web")).state is TaskState.RUNNING
        await client.get_events(0)
        await client.put_task("web", a_spec(generation=3, disconnect=STOP))
        uptime.now_s += 42
        assert _fence(host, uptime) == [unit("web")]
        assert host.fake.systemd.started == [unit("web")]


@pytest.mark.usefixtures("component")
async def test_a_removed_task_leaves_nothing_for_the_fence(host: FakeHost, uptime: Uptime) -> None:
    async with host.agent() as client:
        await _start(host, uptime, client)
        assert (_folder(host) / "web").exists()
        await client.delete_task("web")
        with pytest.raises(Exception, match="there is no task web"):
            await until(client, "web", lambda _: False)
        assert not (_folder(host) / "web").exists()


@pytest.mark.usefixtures("component")
async def test_a_poll_waits_no_longer_than_the_most_impatient_task_allows(
    host: FakeHost, uptime: Uptime
) -> None:
    async with host.serving() as (services, client):
        assert services.contact.wait_s(20.0) == 20.0
        await _start(host, uptime, client)
        assert services.contact.wait_s(20.0) == 7.5


def test_files_of_the_fence_from_an_earlier_boot_are_removed(tmp_path: Path) -> None:
    first = Contact(tmp_path / "fence", "boot-1", lambda: 1000.0)
    first.record_contact(first.answer(), 3)
    (tmp_path / "fence" / "web").write_text("30.0 10.0\n")
    again = Contact(tmp_path / "fence", "boot-2", lambda: 5.0)

    assert again.moment("web").contact_s is None
    assert not (tmp_path / "fence" / "web").exists()


def test_the_fence_kills_where_it_cannot_read_how_long_a_task_may_run(tmp_path: Path) -> None:
    (tmp_path / ".heard").write_text("100.0\n")
    (tmp_path / "good").write_text("30.0 10.0\n")
    (tmp_path / "torn").write_text("30.0 ")
    assert list(fence.overdue(tmp_path, 101.0)) == ["torn"]
    (tmp_path / ".heard").write_text("soon")
    assert list(fence.overdue(tmp_path, 101.0)) == ["good", "torn"]


@pytest.mark.behaviour("BUG-AG115")
def test_the_fence_kills_a_task_whose_file_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence ignored the file; the agent counts such a task as cut off, and may be dead."""
    (tmp_path / ".heard").write_text("100.0\n")
    for name in ("empty", "removed"):
        (tmp_path / name).touch()
    listed = sorted(tmp_path.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    (tmp_path / "removed").unlink()
    assert list(fence.overdue(tmp_path, 101.0)) == ["empty"]


def test_the_fence_kills_through_the_cgroup_of_the_unit_and_of_no_other(tmp_path: Path) -> None:
    for name, populated in (("web", 1), ("web-1", 1), ("idle", 0)):
        cgroup = tmp_path / "workload-demo.slice" / unit(name)
        cgroup.mkdir(parents=True)
        (cgroup / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
        (cgroup / "cgroup.kill").write_text("")

    assert fence.kill_unit(unit("web"), tmp_path)
    assert not fence.kill_unit(unit("idle"), tmp_path)
    assert not fence.kill_unit(unit("nothing"), tmp_path)
    written = {p.parent.name for p in tmp_path.rglob("cgroup.kill") if p.read_text()}
    assert written == {unit("web")}
