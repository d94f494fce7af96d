"""Sessions inside tasks: over the agent's own socket, on a machine in memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
import pytest
from builders import FakeHost, a_spec, running, unit

from agent.api.exec import ExecEnd, ExecWord
from agent.core.inside import inside_unit
from agent.errors import Busy, InvalidInput, NotFound, from_problem
from agent.machine import Property, UnitState
from agent.machine.fake import Ended, ends_with
from agent.machine.terminals import Streams
from agent.services import exec as sessions
from agent.terminal import attend
from agent.wire.duplex import Duplex, Frame


async def _end(duplex: Duplex) -> tuple[bytes, bytes, ExecEnd]:
    """Return output, errors and the last word of a session."""
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


# AG8
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


async def test_a_command_whose_start_is_still_queued_has_not_ended(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AG8: a busy systemd has the unit loaded, dead, with an earlier job before it."""
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


async def test_a_command_that_systemd_could_not_execute_is_told_in_words(host: FakeHost) -> None:
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
    assert "no such file in the image" in ends[0].detail
    assert ends[1].detail == ""


class _Endless:
    """A command that writes without end, and hears nothing."""

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            yield b"\1y\n"

    async def send(self, frame: Frame) -> None:
        """Take a word."""


async def test_output_that_nobody_reads_any_more_ends_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `exec … | head` does; it is no fault of the agent's."""
    reader, writer = os.pipe()
    os.close(reader)
    write = os.write
    monkeypatch.setattr("os.write", lambda fd, data: write(writer if fd == 1 else fd, data))
    code = await attend(_Endless(), terminal=False, with_input=False)
    os.close(writer)

    assert code == 128 + signal.SIGPIPE


def test_input_that_is_over_before_the_command_opened_it_keeps_nobody_waiting(
    tmp_path: Path,
) -> None:
    streams = Streams.pipes(tmp_path / "one")
    assert streams.paths is not None
    streams.end_input()
    reader = os.open(streams.paths[0], os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):  # it would be b"" if nobody could write any more
        os.read(reader, 1)
    streams.opened()
    assert os.read(reader, 1) == b""
    os.close(reader)
    streams.close()


async def test_a_terminal_has_the_size_that_was_asked_for(host: FakeHost) -> None:
    def size(argv: list[str], properties: Mapping[str, Property]) -> Ended:
        assert "TERM=xterm" in properties["Environment"]  # type: ignore[operator]
        with Path(str(properties["TTYPath"])).open("w") as terminal:
            columns, rows = os.get_terminal_size(terminal.fileno())
            terminal.write(f"{rows}x{columns}")
        return Ended(code=0)

    host.fake.systemd.programs["/bin/size"] = size
    async with host.agent() as client:
        await client.put_task("web", a_spec())
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


async def test_who_leaves_ends_the_command(host: FakeHost) -> None:  # P9
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=True):
            async with asyncio.timeout(10):
                while not _left(host):
                    await asyncio.sleep(0.01)
        await _until_nothing_is_left(host)


async def test_a_session_in_which_nothing_is_said_ends(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:  # F-26
    async with host.serving() as (services, client):
        services.sessions._idle_s = 0.05
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=False) as duplex:
            _, _, end = await _end(duplex)
        await _until_nothing_is_left(host)

    assert end.problem is not None
    assert "nothing was said" in end.problem.detail


async def test_sessions_of_a_task_are_counted(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PER_TASK", 1)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with client.exec_task("web", ["/bin/cat"], tty=False):
            async with asyncio.timeout(10):
                while not _left(host):
                    await asyncio.sleep(0.01)
            async with client.exec_task("web", ["/bin/cat"], tty=False) as second:
                _, _, end = await _end(second)

    assert end.problem is not None
    assert isinstance(from_problem(end.problem), Busy)


async def test_what_cannot_be_run_is_told_in_the_last_word_or_before_it(host: FakeHost) -> None:
    async with host.agent() as client:
        with pytest.raises(NotFound, match="no task none"):
            await client.exec_task("none", ["/bin/x"], tty=False).__aenter__()
        with pytest.raises(InvalidInput, match="command"):
            await client.exec_task("none", [], tty=False).__aenter__()


async def test_a_request_that_is_no_websocket_is_refused_in_words(host: FakeHost) -> None:
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
        streams.opened()
        sent = os.urandom(1 << 20)

        async def feed() -> None:
            await streams.write(sent)
            streams.end_input()

        def drain() -> bytes:
            return b"".join(iter(lambda: os.read(reader, 65536), b""))

        _, got = await asyncio.gather(feed(), asyncio.to_thread(drain))
        streams.close()
        os.close(reader)
        assert got == sent
        assert not (Path(folder) / "one").exists()
