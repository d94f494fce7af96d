"""Which tasks write their output into a pipe, and when the pipe exists."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import FakeHost, a_record, a_spec, gone, running

from agent.api import Relaxation, Stdout
from agent.host.logs import LoggedRun, journal_command
from agent.host.output_pipes import OutputPipes, is_piped
from agent.runtime.core.records import key_of, unit_of
from agent.runtime.offload import Lanes


@pytest.fixture
def woken(host: FakeHost) -> Iterator[socket.socket]:
    """The socket on which twine-output.service listens."""
    folder = Path(host.config.run_dir) / "output"
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as found:
        found.bind(str(folder / ".wake"))
        yield found


@pytest.mark.behaviour("BUG-AG34", "BUG-AG39")
def test_every_output_is_a_pipe_unless_the_socket_is_requested() -> None:
    assert is_piped(a_spec())
    assert is_piped(a_spec(stdout=Stdout.PIPE))
    assert not is_piped(a_spec(stdout=Stdout.JOURNAL))
    assert not is_piped(a_spec(relaxations=[Relaxation.OWN_INIT]))
    assert key_of(a_spec()) != key_of(a_spec(stdout=Stdout.PIPE))


@pytest.mark.behaviour("BUG-AG34")
async def test_a_task_has_a_pipe_from_its_start_to_its_end(
    host: FakeHost, woken: socket.socket
) -> None:
    """The service is woken, and no other user can access the pipes of others."""
    pipe = Path(host.config.run_dir) / "output" / "local" / "web"
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        unit = host.fake.systemd.properties(unit_of("web"))
        mode = pipe.stat().st_mode
        assert (stat.S_ISFIFO(mode), stat.S_IMODE(mode)) == (True, 0o622)
        assert stat.S_IMODE(pipe.parent.stat().st_mode) == 0o700
        assert (unit["StandardOutputFile"], unit["StandardErrorFile"]) == (str(pipe),) * 2
        assert woken.recv(16) == b"x"
        await client.delete_task("web")
        await gone(client, "web")
        assert not pipe.exists()


@pytest.mark.behaviour("BUG-AG34")
async def test_without_the_service_a_task_starts_with_the_socket(host: FakeHost) -> None:
    """A start does not wait for a reader that never comes."""
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
    assert "StandardOutputFile" not in host.fake.systemd.properties(unit_of("web"))


@pytest.mark.behaviour("BUG-AG42")
async def test_facts_count_the_lines_that_are_in_no_log(
    host: FakeHost, woken: socket.socket
) -> None:
    (Path(host.config.run_dir) / "output" / ".lost").write_text("[12, 3]")
    async with host.agent() as client:
        facts = await client.get_machine()
    assert (facts.log_lines_suppressed, facts.log_lines_lost) == (12, 3)


async def test_a_pipe_that_is_there_is_kept(tmp_path: Path) -> None:
    """A repeated start uses the pipe that the service has already opened."""
    folder = tmp_path / "output"
    folder.mkdir()
    (folder / ".wake").touch()
    lanes = Lanes()
    pipes = OutputPipes(tmp_path, lanes)
    before = []
    for _ in range(2):
        await pipes.ensure(a_record())
        before.append([p.stat().st_ino for p in folder.glob("*/*")])
    lanes.close()
    assert before[0] == before[1] != []


@pytest.mark.behaviour("BUG-AG34")
def test_logs_are_read_from_the_entries_of_the_service_too() -> None:
    """Only entries of the service itself count; no task can write entries in its name."""
    run = LoggedRun("twine-task-web.service", "twine-a", "4" * 32)
    words = journal_command(run)
    at = words.index("_SYSTEMD_UNIT=twine-output.service")
    unit, invocation = "twine-task-web.service", "4" * 32
    assert words[at - 1 : at + 3] == [
        "+",
        "_SYSTEMD_UNIT=twine-output.service",
        f"OBJECT_SYSTEMD_UNIT={unit}",
        f"OBJECT_SYSTEMD_INVOCATION_ID={invocation}",
    ]


@pytest.mark.behaviour("BUG-AG108")
async def test_a_pipe_whose_creation_was_interrupted_gets_its_mode(
    host: FakeHost, woken: socket.socket
) -> None:
    """An agent that died before it set the mode left a pipe that its task could not open."""
    pipe = Path(host.config.run_dir) / "output" / "local" / "web"
    pipe.parent.mkdir(mode=0o700)
    os.mkfifo(pipe, 0o600)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        assert stat.S_IMODE(pipe.stat().st_mode) == 0o622
