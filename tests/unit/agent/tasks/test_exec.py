"""Sessions inside tasks: over the agent's own socket, on a machine in memory."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from builders import FakeHost, a_spec, running, unit, until

from agent.api import Health, Limits, Probe, ProbeKind, TaskState
from agent.api.exec import TAKEN, ExecEnd, ExecWord, taken_frame
from agent.machine import Property, UnitState
from agent.machine.fake_programs import ends_with
from agent.machine.fake_systemd import Ended
from agent.machine.terminals import Streams
from agent.tasks import exec as sessions
from agent.tasks.core.inside import inside_unit
from agent.terminal import _exit_code, run_session
from wire.duplex import Duplex, Frame
from wire.errors import Busy, HostError, InvalidInput, NotFound, from_problem
from wire.flow import WINDOW_BYTES, ReceiveQueue, SendWindow


async def _end(duplex: Duplex) -> tuple[bytes, bytes, ExecEnd]:
    """Return output, errors and the final message of a session."""
    written = {1: b"", 2: b""}
    async for frame in duplex.frames():
        if isinstance(frame, str):
            return written[1], written[2], msgspec.json.decode(frame, type=ExecEnd)
        written[frame[0]] += frame[1:]
    raise AssertionError("the session broke off without a last word")


def _left(host: FakeHost) -> list[str]:
    folder = host.folder / "run" / "exec"
    left = [u.unit for u in host.fake.systemd.units("twine-in-*")]
    return left + [p.name for p in folder.glob("*")]


async def _until_nothing_is_left(host: FakeHost) -> None:
    async with asyncio.timeout(10):
        while _left(host):
            await asyncio.sleep(0.01)


@pytest.mark.behaviour("AG8")
async def test_output_errors_and_exit_code_come_back_and_nothing_stays(host: FakeHost) -> None:
    def speak(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        Path(str(properties["StandardOutputFile"])).write_bytes(b"out")
        Path(str(properties["StandardErrorFile"])).write_bytes(b"err")
        assert properties["Requisite"] == [unit("web")]
        return Ended(code=7)

    host.fake.systemd.programs["/bin/speak"] = speak
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/speak", "a b"], tty=False) as duplex:
            assert await _end(duplex) == (b"out", b"err", ExecEnd(code=7))
        await _until_nothing_is_left(host)


@pytest.mark.behaviour("BUG-AG32")
async def test_a_command_that_used_too_much_memory_ends_alone_and_reports_it(
    host: FakeHost,
) -> None:
    """The command was in the task's cgroup, and the OOM killer ended the task because of it."""
    host.fake.systemd.programs["/bin/eat"] = lambda _argv, _properties: Ended(
        code=None, signal="SIGKILL", result="oom-kill"
    )
    async with host.agent() as client:
        await client.put_task("web", a_spec(limits=Limits(memory_max_bytes=64 << 20)))
        before = await running(client, "web")
        async with client.exec_task("web", ["/bin/eat"], tty=False) as duplex:
            _, _, end = await _end(duplex)
        assert end.signal == "SIGKILL"
        assert "it exceeded 32MiB of memory, the limit of a command inside this task" in end.detail
        assert "the task continues to run" in end.detail
        assert (await running(client, "web")).invocation_id == before.invocation_id


@pytest.mark.behaviour("BUG-AG32")
async def test_a_probe_that_used_too_much_memory_reports_it(host: FakeHost) -> None:
    """The reason named the task as the cause."""
    host.fake.systemd.programs["/bin/eat"] = lambda _argv, _properties: Ended(
        code=None, signal="SIGKILL", result="oom-kill"
    )
    probe = Probe(kind=ProbeKind.EXEC, command=["/bin/eat"], interval_s=0.05, start_period_s=0.0)
    async with host.agent() as client:
        await client.put_task("web", a_spec(probe=probe))
        status = await until(client, "web", lambda s: s.health is Health.UNHEALTHY)
        assert "of memory, the limit of a command inside this task" in status.reason
        assert status.state is TaskState.RUNNING


@pytest.mark.behaviour("AG8")
async def test_a_command_whose_start_is_still_queued_has_not_ended(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy systemd the unit is loaded and dead, with an earlier job before its start."""
    find, queued = host.fake.systemd.find, iter(range(2))

    def slowly(name: str) -> UnitState | None:
        state = find(name)
        if state is None or not name.startswith("twine-in-") or next(queued, None) is None:
            return state
        return UnitState(unit=name, active="inactive", sub="dead")

    monkeypatch.setattr(host.fake.systemd, "find", slowly)
    host.fake.systemd.programs["/bin/speak"] = lambda *_: Ended(code=7)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/speak"], tty=False) as duplex:
            assert (await _end(duplex))[2] == ExecEnd(code=7)
    assert next(queued, None) is None


async def test_a_command_that_systemd_could_not_execute_is_explained(host: FakeHost) -> None:
    host.fake.systemd.programs["/bin/none"] = ends_with(203)
    host.fake.systemd.programs["/bin/three"] = ends_with(3)
    ends = []
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        for program in ("/bin/none", "/bin/three"):
            async with client.exec_task("web", [program], tty=False) as duplex:
                ends.append((await _end(duplex))[2])

    assert [end.code for end in ends] == [203, 3]
    assert "it is missing from the image" in ends[0].detail
    assert ends[1].detail == ""


@pytest.mark.behaviour("AG8")
async def test_a_state_read_during_a_start_is_no_end(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properties are read one by one, so a dead unit may have the invocation of its next start."""
    find, torn = host.fake.systemd.find, iter(range(2))

    def one_by_one(name: str) -> UnitState | None:
        state = find(name)
        if state is None or not name.startswith("twine-in-") or next(torn, None) is None:
            return state
        return UnitState(unit=name, active="inactive", sub="dead", invocation_id="ab" * 16)

    monkeypatch.setattr(host.fake.systemd, "find", one_by_one)
    host.fake.systemd.programs["/bin/speak"] = lambda *_: Ended(code=7)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/speak"], tty=False) as duplex:
            assert (await _end(duplex))[2] == ExecEnd(code=7)
    assert next(torn, None) is None


@pytest.mark.behaviour("AG8")
async def test_a_command_that_ended_with_its_task_reports_it(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message stated that a unit was not started, and the exit code blamed the host."""
    find = host.fake.systemd.find
    gone = lambda name: None if name.startswith("twine-in-") else find(name)  # noqa: E731
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        monkeypatch.setattr(host.fake.systemd, "find", gone)
        async with client.exec_task("web", ["/bin/cat"], tty=False) as duplex:
            _, _, end = await _end(duplex)
        monkeypatch.setattr(host.fake.systemd, "find", find)

    assert end.problem is not None
    assert isinstance(from_problem(end.problem), Busy)
    assert "ended with its task" in end.problem.detail


class _Endless:
    """A command that writes without end and ignores its input."""

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            yield b"\1y\n"

    async def send(self, frame: Frame) -> None:
        """Receive a frame and ignore it."""


async def test_a_client_that_stops_reading_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example `exec … | head`; the agent has no fault in this."""
    reader, writer = os.pipe()
    os.close(reader)
    write = os.write
    monkeypatch.setattr("os.write", lambda fd, data: write(writer if fd == 1 else fd, data))
    code = await run_session(_Endless(), terminal=False, with_input=False)
    os.close(writer)

    assert code == 128 + signal.SIGPIPE


class _Talkative:
    """A command that writes more than a pipe holds, and records the acknowledgements it gets."""

    def __init__(self) -> None:
        self.received, self.counted = threading.Event(), list[int]()

    async def frames(self) -> AsyncIterator[Frame]:
        for _ in range(4):
            yield b"\1" + bytes(60_000)
        await asyncio.to_thread(lambda: None)  # until the other tasks had their turn
        self.received.set()
        yield msgspec.json.encode(ExecEnd(code=0)).decode()

    async def send(self, frame: Frame) -> None:
        assert isinstance(frame, bytes)
        assert frame[0] == TAKEN
        self.counted.append(int.from_bytes(frame[1:], "big"))


@pytest.mark.behaviour("AG8")
async def test_a_slow_reader_still_gets_the_agents_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its pings are not answered, and `exec … | less` breaks off after 30 seconds."""
    command, write = _Talkative(), os.write
    reader, writer = os.pipe()
    read: dict[str, object] = {}

    def slowly() -> None:
        read["received"] = command.received.wait(10)
        read["size"] = sum(iter(lambda: len(os.read(reader, 65536)), 0))

    thread = threading.Thread(target=slowly)
    thread.start()
    monkeypatch.setattr("os.write", lambda fd, data: write(writer if fd == 1 else fd, data))
    code = await run_session(command, terminal=False, with_input=False)
    os.close(writer)
    await asyncio.to_thread(thread.join)
    os.close(reader)

    assert (code, read) == (0, {"received": True, "size": 240_000})
    assert command.counted == [0, 60_000, 120_000, 180_000, 240_000]


async def test_a_full_disk_of_the_client_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.write", full)
    with pytest.raises(HostError, match="cannot write the command's output here: No space"):
        await run_session(_Talkative(), terminal=False, with_input=False)


@pytest.mark.behaviour("AG8")
async def test_a_signal_overtakes_input_that_the_command_does_not_read(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pings and the end of the connection also pass a full pipe to the command."""
    start, readers = host.fake.systemd.start_transient, list[int]()

    def opens_its_input(unit: str, properties: Mapping[str, Property]) -> None:
        if path := properties.get("StandardInputFile"):
            readers.append(os.open(str(path), os.O_RDONLY | os.O_NONBLOCK))
        start(unit, properties)

    monkeypatch.setattr(host.fake.systemd, "start_transient", opens_its_input)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/sleep"], tty=False) as duplex:
            await duplex.send(taken_frame(0))
            async with asyncio.timeout(10):
                while not readers:
                    await asyncio.sleep(0.01)
            for _ in range(WINDOW_BYTES >> 15):
                await duplex.send(b"\0" + bytes(1 << 15))
            await duplex.send(msgspec.json.encode(ExecWord(signal=15)).decode())
            async with asyncio.timeout(10):
                words = [frame async for frame in duplex.frames()]
        await _until_nothing_is_left(host)

    os.close(*readers)
    assert msgspec.json.decode(words[-1], type=ExecEnd) == ExecEnd(signal="SIGTERM")
    assert words[0] == taken_frame(0)


class _Written:
    """Output that was written before the command ended."""

    def __init__(self) -> None:
        self._left = [b"last words"]

    async def read(self, stream: int) -> bytes:
        return self._left.pop() if self._left else b""


class _Slow(_Endless):
    def __init__(self) -> None:
        self.sent: list[Frame] = []

    async def send(self, frame: Frame) -> None:
        self.sent.append(frame)


async def test_the_last_output_of_a_command_arrives_even_at_a_slow_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_DRAIN_S", 0.001)
    duplex: Any = _Slow()
    whatever: Any = _Written()
    session = sessions._Session(whatever, "unit", whatever, duplex, 60.0)
    session._output.acknowledge(0)
    await session._output.reserve(WINDOW_BYTES)
    sending = asyncio.ensure_future(session._send_output(1))
    reported = asyncio.ensure_future(session._drain([sending], set()))
    await asyncio.wait({reported}, timeout=0.1)
    assert (reported.done(), duplex.sent) == (False, [])

    session._output.acknowledge(WINDOW_BYTES)
    await reported

    assert duplex.sent == [b"\1last words"]


async def test_a_client_without_flow_control_gets_everything_within_bounds() -> None:
    """An older program on either side does not know flow-control windows."""
    outflow, inflow = SendWindow(), ReceiveQueue()
    async with asyncio.timeout(10):
        await outflow.reserve(10 * WINDOW_BYTES)
        await outflow.reserve(1)
        await inflow.put(bytes(2 * WINDOW_BYTES))
    late = asyncio.ensure_future(inflow.put(b"more"))
    await asyncio.wait({late}, timeout=0.01)
    assert not late.done()

    assert len(await inflow.get() or b"") == 2 * WINDOW_BYTES
    await late
    assert await inflow.get() == b"more"


@pytest.mark.behaviour("BUG-AG51")
@pytest.mark.parametrize("frame", [b"", None])
async def test_frames_without_data_are_bounded(frame: bytes | None) -> None:
    """The agent held them without limit while a command did not read its input."""
    inflow = ReceiveQueue()
    await inflow.put(bytes(2 * WINDOW_BYTES - 1))
    await inflow.put(frame)
    late = asyncio.ensure_future(inflow.put(frame))
    await asyncio.wait({late}, timeout=0.01)
    assert not late.done()
    assert len(await inflow.get() or b"") == 2 * WINDOW_BYTES - 1
    await late


@pytest.mark.behaviour("BUG-AG52")
@pytest.mark.parametrize("refused", ["in", "out", "err"])
async def test_pipes_that_cannot_all_be_opened_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Pipes that were already open stayed open, and the client got no reason."""
    before, real = set(os.listdir("/proc/self/fd")), os.open

    def opened(path: Path, flags: int, *args: Any) -> int:
        if flags & os.O_WRONLY and path.name == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *args)

    with monkeypatch.context() as short:
        short.setattr(os, "open", opened)
        with pytest.raises(HostError, match="cannot be made: Too many open files"):
            Streams.pipes(tmp_path / "one")
    assert set(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "one").exists()


@pytest.mark.behaviour("BUG-AG52")
async def test_a_terminal_that_cannot_be_opened_is_explained(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session broke off without a reason."""

    def refuse() -> tuple[int, int]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        monkeypatch.setattr(os, "openpty", refuse)
        async with client.exec_task("web", ["/bin/sh"], tty=True) as duplex:
            _, _, end = await _end(duplex)
    assert end.problem is not None
    assert "a terminal cannot be opened: No space left on device" in end.problem.detail


async def test_input_that_ends_before_the_command_opens_it_does_not_block(
    tmp_path: Path,
) -> None:
    streams = Streams.pipes(tmp_path / "one")
    assert streams.paths is not None
    await streams.end_input()
    reader = os.open(streams.paths[0], os.O_RDONLY | os.O_NONBLOCK)
    # the result would be b"" if no process could write any more
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    streams.close_command_ends()
    assert os.read(reader, 1) == b""
    os.close(reader)
    streams.close()


@pytest.mark.behaviour("BUG-AG50")
async def test_a_terminal_has_the_requested_size(host: FakeHost) -> None:
    """systemd refuses a unit that sets a variable twice."""

    def size(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        environment = properties["Environment"]
        assert isinstance(environment, list)
        assert [pair for pair in environment if pair.startswith("TERM=")] == ["TERM=xterm"]
        with Path(str(properties["TTYPath"])).open("w") as terminal:
            columns, rows = os.get_terminal_size(terminal.fileno())
            terminal.write(f"{rows}x{columns}")
        return Ended(code=0)

    host.fake.systemd.programs["/bin/size"] = size
    async with host.agent() as client:
        await client.put_task("web", a_spec(environment={"TERM": "dumb"}))
        await running(client, "web")
        session = client.exec_task("web", ["/bin/size"], tty=True, rows=31, columns=97)
        async with session as duplex:
            assert await _end(duplex) == (b"31x97", b"", ExecEnd(code=0))


async def test_input_and_signals_reach_the_command(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=False) as duplex:
            await duplex.send(b"\0typed")
            folder = host.folder / "run" / "exec"
            async with asyncio.timeout(10):
                while not list(folder.glob("*/in")):
                    await asyncio.sleep(0.01)
            await duplex.send(msgspec.json.encode(ExecWord(signal=15)).decode())
            _, _, end = await _end(duplex)
        await _until_nothing_is_left(host)

    assert end == ExecEnd(signal="SIGTERM")


async def test_a_client_that_disconnects_ends_the_command(host: FakeHost) -> None:  # P9
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=True):
            async with asyncio.timeout(10):
                while not _left(host):
                    await asyncio.sleep(0.01)
        await _until_nothing_is_left(host)


@pytest.mark.behaviour("F-26")
async def test_an_idle_session_ends(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async with host.serving() as (services, client):
        services.sessions._idle_s = 0.05
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=False) as duplex:
            _, _, end = await _end(duplex)
        await _until_nothing_is_left(host)

    assert end.problem is not None
    assert "it was idle for too long" in end.problem.detail


@pytest.mark.behaviour("BUG-AG116")
async def test_sessions_of_a_task_are_counted(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PER_TASK", 1)
    async with host.serving() as (services, client):
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=False):
            async with asyncio.timeout(10):
                while not _left(host):
                    await asyncio.sleep(0.01)
            async with client.exec_task("web", ["/bin/cat"], tty=False) as second:
                async with asyncio.timeout(10):
                    _, _, end = await _end(second)
        await _until_nothing_is_left(host)
        async with asyncio.timeout(10):
            while services.sessions._sessions_of:
                await asyncio.sleep(0.01)

    assert end.problem is not None
    assert isinstance(from_problem(end.problem), Busy)


async def test_a_failed_exec_is_reported_in_the_last_message_or_before(host: FakeHost) -> None:
    async with host.agent() as client:
        with pytest.raises(NotFound, match="no task none"):
            await client.exec_task("none", ["/bin/x"], tty=False).__aenter__()
        with pytest.raises(InvalidInput, match="command"):
            await client.exec_task("none", [], tty=False).__aenter__()


async def test_a_request_that_is_no_websocket_is_refused_with_a_message(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        connector = aiohttp.UnixConnector(path=host.config.socket)
        async with aiohttp.ClientSession(connector=connector) as session:
            url = "http://local/v1/tasks/web/exec?command=%5B%22/bin/x%22%5D"
            async with session.get(url) as answer:
                assert answer.status == 400
                assert "websocket" in (await answer.json())["hint"]


async def test_a_new_agent_ends_the_sessions_of_the_one_before(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    left = inside_unit("web", "exec-dead")
    host.fake.systemd.start_transient(left, {"ExecStart": [["/bin/cat"]]})
    (host.folder / "run" / "exec" / "exec-dead").mkdir(parents=True)
    async with host.agent():
        assert _left(host) == []


async def test_pipes_carry_a_megabyte_and_end() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        streams = Streams.pipes(Path(folder) / "one")
        assert streams.paths is not None
        reader = os.open(streams.paths[0], os.O_RDONLY)
        streams.close_command_ends()
        sent = os.urandom(1 << 20)

        async def feed() -> None:
            await streams.write(sent)
            await streams.end_input()

        def drain() -> bytes:
            return b"".join(iter(lambda: os.read(reader, 65536), b""))

        _, got = await asyncio.gather(feed(), asyncio.to_thread(drain))
        streams.close()
        os.close(reader)
        assert got == sent
        assert not (Path(folder) / "one").exists()


@pytest.mark.behaviour("BUG-AG105")
@pytest.mark.parametrize(
    ("name", "code"), [("SIGKILL", 137), ("SIGRTMIN+6", 168), ("SIG33", 161), ("SIGNOTHING", 128)]
)
def test_the_exit_code_has_the_number_of_each_signal(name: str, code: int) -> None:
    """The code of a command that a real-time signal had ended was 128."""
    assert _exit_code(ExecEnd(signal=name)) == code
