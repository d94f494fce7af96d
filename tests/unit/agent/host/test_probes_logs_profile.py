"""Probes against a real server on the loopback address; logs; the host's profile."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from builders import FakeHost, a_spec, running, unit, until
from msgspec.structs import replace

from agent.api import (
    COUNT_MAX,
    Event,
    Health,
    Probe,
    ProbeKind,
    ProfileSpec,
    ProfileState,
    ProfileStatus,
    TaskState,
)
from agent.client import AgentClient
from agent.host import facts, host_profile
from agent.host.host_profile import DELIVERED_PROFILES, UNIT
from agent.host.logs import LoggedRun, Logs, journal_command
from agent.machine import Completed, UnitState, boottime_s
from agent.machine.fake_systemd import Ended
from agent.runtime.journal import Journal
from agent.tasks.prober import Prober, RunInTask
from control_plane.api.profiles import version_name
from wire.errors import (
    Conflict,
    NotFound,
    ProgramError,
    SystemdError,
    Unprocessable,
    Unreachable,
)


@asynccontextmanager
async def a_server(answer: list[str]) -> AsyncIterator[int]:
    """Serve HTTP on a free port with the status in `answer[0]`; yield the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            if answer[0] != "silence":
                writer.write(f"HTTP/1.1 {answer[0]} x\r\nContent-Length: 0\r\n\r\n".encode())
            else:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def a_probe(port: int, kind: ProbeKind = ProbeKind.HTTP, **fields: Any) -> Probe:
    quick = {"interval_s": 0.005, "timeout_s": 0.2, "failures": 2, "start_period_s": 0, **fields}
    return Probe(kind=kind, port=port, **quick)


async def _unused_port() -> int:
    async with a_server(["200"]) as port:
        return port


async def test_a_task_is_healthy_once_its_probe_answers_and_not_when_it_fails(
    host: FakeHost,
) -> None:
    answer = ["200"]
    async with a_server(answer) as port, host.agent() as client:
        await client.put_task("web", a_spec(probe=a_probe(port)))
        await until(client, "web", lambda s: s.health is Health.HEALTHY)
        answer[0] = "500"
        sick = await until(client, "web", lambda s: s.health is Health.UNHEALTHY)
        answer[0] = "302"
        well = await until(client, "web", lambda s: s.health is Health.HEALTHY)

    assert "HTTP 500" in sick.reason
    assert (well.reason, well.state) == ("", TaskState.RUNNING)
    assert len(host.fake.systemd.started) == 1


@pytest.mark.behaviour("BUG-AG11")
async def test_a_slow_starter_is_not_unhealthy_before_its_start_period_is_over(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, answer, answers, enough = Prober._probe_once, ["503"], list[str](), asyncio.Event()

    async def counted(self: Prober, probe: Probe, inside: RunInTask, at: str) -> str:
        answers.append(await really(self, probe, inside, at))
        if len(answers) == 10:
            enough.set()
        return answers[-1]

    monkeypatch.setattr(Prober, "_probe_once", counted)
    async with a_server(answer) as port, host.agent() as client:
        before = (await client.get_events(0)).latest
        await client.put_task("web", a_spec(probe=a_probe(port, start_period_s=3600, failures=1)))
        await running(client, "web")
        await enough.wait()
        answer[0] = "200"
        await until(client, "web", lambda s: s.health is Health.HEALTHY)
        seen = [e.task.health for e in (await client.get_events(before)).events if e.task]
        answer[0] = "503"
        await until(client, "web", lambda s: s.health is Health.UNHEALTHY)

    assert Health.UNHEALTHY not in seen


@pytest.mark.behaviour("BUG-AG11")
async def test_an_agent_restart_does_not_restart_the_start_period(
    host: FakeHost,
) -> None:
    answer = ["503"]
    async with a_server(answer) as port:
        async with host.agent() as client:
            await client.put_task("web", a_spec(probe=a_probe(port, start_period_s=60)))
            await running(client, "web")
            journal = Journal(host.state / "journal")
            while journal.replay().tasks["web"].started_boot_s is None:
                await asyncio.sleep(0)
        later = replace(host.fake.machine, boottime_s=lambda: boottime_s() + 61.0)
        async with host.agent(later) as client:
            await until(client, "web", lambda s: s.health is Health.UNHEALTHY)


@pytest.mark.behaviour("BUG-AG90")
@pytest.mark.parametrize(
    ("kind", "interval_s", "pauses"),
    [
        (ProbeKind.TCP, 1e-9, [0.1, 0.1, 0.1]),
        (ProbeKind.EXEC, 1e-9, [0.5, 0.5, 0.5]),
        (ProbeKind.EXEC, 2.0, [0.5, 2.0, 2.0]),
    ],
)
async def test_a_tiny_interval_does_not_keep_agent_and_systemd_busy(
    monkeypatch: pytest.MonkeyPatch, kind: ProbeKind, interval_s: float, pauses: list[float]
) -> None:
    """The owner of a job could occupy the agent with it, and systemd with units of commands."""
    found: list[float] = []

    async def sleep(pause_s: float) -> None:
        found.append(pause_s)
        if len(found) == len(pauses):
            raise asyncio.CancelledError

    async def answered(*_: object) -> str:
        return ""

    monkeypatch.setattr(Prober, "_probe_once", answered)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    target = {"command": ["/x"]} if kind is ProbeKind.EXEC else {"port": 1}
    probe = Probe(kind=kind, interval_s=interval_s, successes=2, **target)
    with pytest.raises(asyncio.CancelledError):
        await Prober().watch(probe, Health.UNKNOWN, answered, answered)
    assert found == pauses


@pytest.mark.behaviour("AG5")
async def test_health_survives_a_restart_of_the_agent(host: FakeHost) -> None:
    async with a_server(["200"]) as port:
        async with host.agent() as client:
            await client.put_task("web", a_spec(probe=a_probe(port)))
            await until(client, "web", lambda s: s.health is Health.HEALTHY)
        async with host.agent() as client:
            assert (await client.get_task("web")).health is Health.HEALTHY


async def test_a_port_that_opens_is_enough_for_tcp(host: FakeHost) -> None:
    async with a_server(["200"]) as port, host.agent() as client:
        await client.put_task("web", a_spec(probe=a_probe(port, ProbeKind.TCP)))
        await until(client, "web", lambda s: s.health is Health.HEALTHY)


@pytest.mark.parametrize("kind", [ProbeKind.HTTP, ProbeKind.TCP])
async def test_a_closed_port_is_unhealthy_with_a_reason(host: FakeHost, kind: ProbeKind) -> None:
    port = await _unused_port()
    async with host.agent() as client:
        await client.put_task("web", a_spec(probe=a_probe(port, kind)))
        status = await until(client, "web", lambda s: s.health is Health.UNHEALTHY)

    assert f"port {port}" in status.reason


async def test_a_server_that_does_not_answer_in_time_is_unhealthy(host: FakeHost) -> None:
    async with a_server(["silence"]) as port, host.agent() as client:
        await client.put_task("web", a_spec(probe=a_probe(port, timeout_s=0.02)))
        status = await until(client, "web", lambda s: s.health is Health.UNHEALTHY)

    assert "no answer within" in status.reason


@pytest.mark.behaviour("BUG-AG66")
async def test_servers_that_hang_delay_no_other_probe() -> None:
    """A client of aiohttp has at most 100 connections by default: this task became unhealthy."""
    found = asyncio.Queue[Health]()

    async def report(health: Health, _: str) -> None:
        found.put_nowait(health)

    async def inside(_: list[str], __: float) -> str:
        return ""

    prober, asked = Prober(), 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    slow = a_probe(server.sockets[0].getsockname()[1], timeout_s=600)
    async with server, a_server(["200"]) as port:
        watches = [prober.watch(slow, Health.UNKNOWN, report, inside) for _ in range(101)]
        tasks = [asyncio.create_task(watch) for watch in watches]
        async with asyncio.timeout(60):
            while asked < 100:
                await asyncio.sleep(0.01)
            quick = a_probe(port, timeout_s=60)
            tasks.append(asyncio.create_task(prober.watch(quick, Health.UNKNOWN, report, inside)))
            assert await found.get() is Health.HEALTHY
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await prober.close()


async def test_a_prober_with_a_bug_is_started_again(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really, failures = Prober._probe_once, [1, 1]

    async def breaks(self: Prober, probe: Probe, inside: RunInTask, at: str) -> str:
        if failures:
            failures.pop()
            raise RuntimeError("a bug")
        return await really(self, probe, inside, at)

    monkeypatch.setattr(Prober, "_probe_once", breaks)
    async with a_server(["200"]) as port, host.agent() as client:
        await client.put_task("web", a_spec(probe=a_probe(port)))
        await until(client, "web", lambda s: s.health is Health.HEALTHY)

    assert caplog.text.count("a probe failed; this is a bug") == 2


async def _read(client: AgentClient, **options: Any) -> bytes:
    return b"".join([c async for c in client.task_logs("web", **options)])


@pytest.mark.behaviour("BUG-AG34", "BUG-AG42")
async def test_the_log_of_a_task_is_read_from_the_journal(host: FakeHost) -> None:
    lines = [f"line {n}\n".encode() for n in range(500)]
    host.fake.processes.answers[("journalctl",)] = lines
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        whole = await _read(client)
        await _read(client, tail=5, since="12.5")
        host.fake.processes.answers[tuple(journal_command(LoggedRun(unit("nothing"))))] = []
        with pytest.raises(NotFound):
            await anext(client.task_logs("nothing"))

    assert whole == b"".join(lines)
    assert host.fake.processes.calls[-2] == (
        "journalctl",
        "--no-pager",
        "--quiet",
        "--output=cat",
        "--namespace=+twine-local",
        "--since=@12.500000",
        "--lines=5",
        "_SYSTEMD_UNIT=twine-task-web.service",
        "_SYSTEMD_UNIT=twine-step-web.service",
        "_SYSTEMD_UNIT=twine-in-web.pre-stop.service",
        "+",  # lines that came through the task's pipe
        "_SYSTEMD_UNIT=twine-output.service",
        "OBJECT_SYSTEMD_UNIT=twine-task-web.service",
        "+",  # journald's message about dropped lines
        "_TRANSPORT=driver",
        "MESSAGE_ID=a596d6fe7bfa4994828e72309e95d61e",
        "OBJECT_SYSTEMD_UNIT=twine-task-web.service",
    )


def test_following_starts_with_all_lines_unless_a_tail_is_requested() -> None:
    assert {"--lines=all", "--follow"} <= set(journal_command(LoggedRun("u"), follow=True))
    assert "--merge" in journal_command(LoggedRun("u"), follow=True)  # otherwise it needs /proc/sys
    assert "--merge" not in journal_command(LoggedRun("u"))
    assert "--lines=3" in journal_command(LoggedRun("u"), follow=True, tail=3)


async def test_without_journalctl_the_reader_gets_the_reason(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        with pytest.raises(ProgramError, match="no such program"):
            await _read(client)


class Endless:
    """The output of `journalctl --follow`: it ends only when it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        yield b"first\n"
        self.closed.wait(10)

    def close(self) -> None:
        self.closed.set()


class EndlessProcesses:
    """Starts `Endless`, only after `may_start`."""

    def __init__(self) -> None:
        self.started: list[Endless] = []
        self.starting = threading.Event()
        self.may_start = threading.Event()
        self.may_start.set()

    def run(self, *_: Any, **__: Any) -> Completed:
        raise AssertionError("logs are read line by line, nothing is run to its end")

    def lines(self, _: object) -> Endless:
        self.starting.set()
        self.may_start.wait(10)
        self.started.append(Endless())
        return self.started[-1]


def _log_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("logs-")]


async def test_a_disconnected_reader_ends_the_program_and_the_thread() -> None:
    processes = EndlessProcesses()
    reader = Logs(processes).read(LoggedRun("u"), follow=True)
    assert await anext(reader) == b"first\n"
    await reader.aclose()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "logs-u":
            await asyncio.to_thread(thread.join, 5)

    assert processes.started[0].closed.is_set()
    assert _log_threads() == []


async def test_a_reader_that_disconnects_during_the_start_ends_the_program() -> None:
    processes = EndlessProcesses()
    processes.may_start.clear()
    reading = asyncio.ensure_future(anext(Logs(processes).read(LoggedRun("u"), follow=True)))
    await asyncio.to_thread(processes.starting.wait, 5)
    reading.cancel()
    await asyncio.wait({reading})
    processes.may_start.set()
    while not processes.started or not processes.started[0].closed.is_set():
        await asyncio.sleep(0)

    assert _log_threads() == []


async def test_a_journal_that_cannot_be_read_is_no_empty_log(host: FakeHost) -> None:
    """journalctl's exit code was ignored, so its failure looked like a log without lines."""
    failure = Completed(1, "", "Failed to open journal: Input/output error")
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        host.fake.processes.answers[("journalctl",)] = failure
        with pytest.raises(ProgramError, match="Input/output error"):
            await anext(client.task_logs("web"))
        host.fake.processes.answers[("journalctl",)] = replace(failure, stdout="first\n")
        with pytest.raises(Unreachable, match="its answer was truncated"):
            await _read(client)


async def test_a_slow_reader_gets_everything_in_order() -> None:
    class Many(Endless):
        def __iter__(self) -> Iterator[bytes]:
            return (str(n).encode() for n in range(1000))

    processes = EndlessProcesses()
    processes.lines = lambda _: Many()  # type: ignore[method-assign]
    found = [int(line) async for line in Logs(processes).read(LoggedRun("u"))]

    assert found == list(range(1000))


def _sidekick(host: FakeHost, state: ProfileState = ProfileState.VERIFIED) -> list[list[str]]:
    """Make sidekick report this; return the calls of sidekick."""
    calls: list[list[str]] = []

    def program(argv: list[str], _: object) -> Ended:
        calls.append(argv)
        options = dict(
            o.removeprefix("--").split("=") for o in argv if o.startswith("--") and "=" in o
        )
        report = {
            "name": argv[2],
            "generation": int(options["generation"]),
            "epoch": int(options["epoch"]),
            "state": state.value,
        }
        folder = host.folder / "sidekick"
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps(report))
        return Ended(0)

    host.fake.systemd.programs["sidekick"] = program
    return calls


async def _profile(client: AgentClient, state: ProfileState, generation: int) -> ProfileStatus:
    async with asyncio.timeout(10):
        after = (await client.get_events(0)).latest
        while True:
            status = await client.get_profile()
            if (status.state, status.generation) == (state, generation):
                return status
            after = (await client.get_events(after, wait_s=5)).latest


@pytest.mark.behaviour("HP13")
async def test_a_profile_that_is_delivered_is_kept_under_its_digest(host: FakeHost) -> None:
    """sidekick finds the profile by its name, also at each boot; a name never gets another text."""
    calls = _sidekick(host)
    name = version_name("web", "what it says")
    async with host.agent() as client:
        wrong = ProfileSpec(name=name, generation=2, text="something else")
        with pytest.raises(Unprocessable, match="is not taken: the digest"):
            await client.put_profile(wrong)
        await client.put_profile(ProfileSpec(name=name, generation=2, text="what it says"))
        await _profile(client, ProfileState.VERIFIED, 2)
    assert [call[1:3] for call in calls] == [["apply-profile", name]]
    folder = host.folder / "sidekick" / DELIVERED_PROFILES
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(f"{name}.toml", "what it says")]


async def test_sidekick_applies_a_profile_in_a_separate_unit(host: FakeHost) -> None:
    calls = _sidekick(host)
    programs, released = host.fake.systemd.programs, threading.Event()
    at_once = programs["sidekick"]

    def held(argv: list[str], properties: object) -> Callable[[], Ended]:
        def run() -> Ended:
            released.wait()
            return at_once(argv, properties)

        return run

    programs["sidekick"] = held
    async with host.agent() as client:
        switch = await client.put_profile(ProfileSpec(name="web", generation=2, allow_reboot=True))
        released.set()
        await _profile(client, ProfileState.VERIFIED, 2)
        again = await client.put_profile(ProfileSpec(name="web", generation=2))
        while host.fake.systemd.find(UNIT):
            await asyncio.sleep(0)

    assert (switch.state, switch.generation) == (ProfileState.APPLYING, 2)
    assert again.state is ProfileState.VERIFIED
    assert len(calls) == 1
    assert calls[0][1:3] == ["apply-profile", "web"]
    assert "--reboot" in calls[0]


async def test_an_older_profile_is_a_conflict_also_before_the_newer_one_is_applied(
    host: FakeHost,
) -> None:
    calls = _sidekick(host)
    async with host.agent() as client:
        answers = await asyncio.gather(
            *(client.put_profile(ProfileSpec(name="web", generation=n)) for n in (3, 5, 4, 2)),
            return_exceptions=True,
        )
        await _profile(client, ProfileState.VERIFIED, 5)
        with pytest.raises(Conflict):
            await client.put_profile(ProfileSpec(name="web", generation=4))

    assert isinstance(answers[3], Conflict)
    assert calls[-1][3] == "--generation=5"


@pytest.mark.behaviour("BUG-HT25")
async def test_a_profile_of_a_term_that_never_was_is_replaced_on_the_host(host: FakeHost) -> None:
    """A report with epoch 2^53 blocks every control plane from applying one; an operator can."""
    calls = _sidekick(host)
    (host.folder / "sidekick").mkdir()
    report = {"name": "web", "generation": 3, "epoch": COUNT_MAX, "state": "verified"}
    (host.folder / "sidekick" / "status.json").write_text(json.dumps(report))
    async with host.serving() as (services, client):
        services.contact.record_contact("", 5)
        wanted = ProfileSpec(name="base", generation=4, epoch=5)
        with pytest.raises(Conflict, match=f"of {COUNT_MAX}"):
            await services.profile.ask(wanted)  # accepted like a request of the control plane
        await client.put_profile(wanted)  # through the host's own socket
        await _profile(client, ProfileState.VERIFIED, 4)
        assert not await services.profile.ask(wanted)
        assert await services.profile.ask(ProfileSpec(name="web", generation=5, epoch=5))
    assert [call[1:3] for call in calls] == [["apply-profile", "base"]]


async def test_a_sidekick_that_ends_without_a_report_leaves_the_profile_degraded(
    host: FakeHost,
) -> None:
    host.fake.systemd.programs["sidekick"] = lambda _argv, _properties: Ended(1)
    async with host.agent() as client:
        await client.put_profile(ProfileSpec(name="web"))
        status = await _profile(client, ProfileState.DEGRADED, 1)

    assert "without a report" in status.detail


@pytest.mark.behaviour("HP15")
async def test_a_profile_verified_in_an_earlier_boot_is_reported_as_drifted(host: FakeHost) -> None:
    # after a reboot a report from before it starts no task
    (host.folder / "sidekick").mkdir()
    report = {"name": "web", "generation": 3, "state": "verified", "boot_id": "another boot"}
    (host.folder / "sidekick" / "status.json").write_text(json.dumps(report))
    async with host.agent() as client:
        status = await client.get_profile()

    assert (status.state, status.generation) == (ProfileState.DRIFTED, 3)
    assert "before this boot" in status.detail


@pytest.mark.behaviour("HP15", "BUG-SK3")
async def test_an_old_report_counts_as_drift(host: FakeHost) -> None:
    # the age is the time since the boot, so a clock step makes no report old
    (host.folder / "sidekick").mkdir()
    path = host.folder / "sidekick" / "status.json"
    now = [5000.0]
    host.fake.boottime_s = lambda: now[0]
    report = {"name": "web", "generation": 3, "state": "verified", "uptime_s": 4500.0}
    path.write_text(json.dumps(report))
    async with host.agent() as client:
        assert (await client.get_profile()).state is ProfileState.VERIFIED
        now[0] = 5200.0
        status = await client.get_profile()
        path.write_text(json.dumps(report | {"uptime_s": 5100.0}))
        again = await client.get_profile()

    assert status.state is ProfileState.DRIFTED
    assert "not verified for 700 s" in status.detail
    assert again.state is ProfileState.VERIFIED


@pytest.mark.behaviour("BUG-SK3", "F-72")
async def test_drift_that_the_timer_found_is_an_event(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_profile, "WATCH_S", 0.01)
    (host.folder / "sidekick").mkdir()
    path = host.folder / "sidekick" / "status.json"
    report = {"name": "web", "generation": 3, "state": "verified"}
    path.write_text(json.dumps(report))
    async with host.agent() as client:
        await _profile(client, ProfileState.VERIFIED, 3)
        after = (await client.get_events(0)).latest
        detail = "vm.swappiness changed after 12:00"
        path.write_text(json.dumps(report | {"state": "drifted", "detail": detail}))
        async with asyncio.timeout(120):
            found: list[Event] = []
            while not any("drifted" in event.message for event in found):
                news = await client.get_events(after, wait_s=5)
                after = news.latest
                found = [event for event in news.events if event.kind == "profile"]

    assert f"drifted: {detail}" in [event.message for event in found]


@pytest.mark.behaviour("BUG-UX120")
async def test_a_profile_that_is_installed_is_reported(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane reads the facts again after an event of this kind."""
    monkeypatch.setattr(host_profile, "WATCH_S", 0.01)
    folder = host.folder / "profiles"
    folder.mkdir()
    monkeypatch.setattr(facts, "PROFILES", (folder,))
    async with host.agent() as client:
        after = (await client.get_events(0)).latest
        assert (await client.get_machine()).profiles == ()
        (folder / "queue.toml").write_text('description = "A longer queue"')
        async with asyncio.timeout(120):
            news = await client.get_events(after, wait_s=60)
            while not any(event.kind == "profile" for event in news.events):
                news = await client.get_events(news.latest, wait_s=60)
        assert (await client.get_machine()).profiles == ("queue",)


@pytest.mark.behaviour("BUG-AG89")
async def test_an_interrupted_switch_is_drift_although_systemd_did_not_answer_at_once(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent took sidekick for running until it ended, and added no event about the profile."""
    monkeypatch.setattr(host_profile, "RETRY_S", 0.01)
    (host.folder / "sidekick").mkdir()
    report = {"name": "web", "generation": 3, "state": "applying"}
    (host.folder / "sidekick" / "status.json").write_text(json.dumps(report))
    find, failures = host.fake.systemd.find, [SystemdError("the bus does not answer")]

    def fails_once(name: str) -> UnitState | None:
        if name == UNIT and failures:
            raise failures.pop()
        return find(name)

    monkeypatch.setattr(host.fake.systemd, "find", fails_once)
    async with host.agent() as client:
        await _profile(client, ProfileState.DRIFTED, 3)
    assert not failures


@pytest.mark.behaviour("F-65")
async def test_an_interrupted_switch_is_drift_until_it_is_requested_again(
    host: FakeHost,
) -> None:  # P6
    (host.folder / "sidekick").mkdir()
    report = {"name": "web", "generation": 3, "state": "applying", "detail": "3 of 5 written"}
    (host.folder / "sidekick" / "status.json").write_text(json.dumps(report))
    _sidekick(host)
    async with host.agent() as client:
        status = await _profile(client, ProfileState.DRIFTED, 3)
        await client.put_profile(ProfileSpec(name="web", generation=3))
        await _profile(client, ProfileState.VERIFIED, 3)

    assert "interrupted: 3 of 5 written" in status.detail


async def test_a_report_that_cannot_be_read_is_reported(host: FakeHost) -> None:
    (host.folder / "sidekick").mkdir()
    (host.folder / "sidekick" / "status.json").write_text("[" * 100_000)
    async with host.agent() as client:
        status = await client.get_profile()

    assert (status.state, "cannot be read" in status.detail) == (ProfileState.DEGRADED, True)


async def test_a_sidekick_from_before_a_restart_of_the_agent_may_end_first(host: FakeHost) -> None:
    host.fake.systemd.start_transient(UNIT, {"Type": "oneshot", "ExecStart": [["earlier"]]})
    calls = _sidekick(host)
    async with host.agent() as client:
        await client.put_profile(ProfileSpec(name="web", generation=2))
        assert calls == []
        host.fake.systemd.exit(UNIT, 0)
        await _profile(client, ProfileState.VERIFIED, 2)

    assert len(calls) == 1


async def test_facts_name_the_machine_and_what_works_on_it(host: FakeHost) -> None:
    async with host.agent() as client:
        facts = await client.get_machine()

    assert (facts.machine_id, facts.cpus) == ("fake", 2)
    assert {"btrfs", "cgroup-v2", "systemd-257", "private-pids"} <= set(facts.capabilities)


async def test_a_task_started_at_is_when_its_unit_was(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        status = await running(client, "web")

    found = host.fake.systemd.find(unit("web"))
    assert found
    assert status.started_at == found.started_at
    assert found.started_at is not None
    assert found.started_at <= time.time()
