"""Log lines for users, in the journal and on a terminal."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import FakeHost, a_record, a_spec, gone, running
from msgspec.structs import replace

from agent.api import Health, TaskState
from agent.runtime.core.records import describe_change, status_of
from wire import log as ours


def a_log_record(message: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("agent", logging.INFO, "f", 1, message, (), None)
    vars(record).update(fields)
    return record


@pytest.mark.behaviour("BUG-AG16")
@pytest.mark.parametrize(
    ("message", "fields", "message_shown"),
    [
        ("ready", {"tasks": 7}, "ready (tasks 7)"),
        ("cannot renew", {"why": "no answer"}, "cannot renew: no answer"),
        (
            "a step of a task failed",
            {"task": "web", "step": "start", "why": "no space"},
            "a step of a task failed (task web, step start): no space",
        ),
        ("task web: starting → running", {"task": "web"}, "task web: starting → running"),
    ],
)
def test_a_line_shows_what_its_fields_contain(
    message: str, fields: dict[str, object], message_shown: str
) -> None:
    assert ours.one_line(a_log_record(message, **fields)) == message_shown


@pytest.mark.behaviour("BUG-AG16")
def test_a_change_is_described_with_old_value_new_value_and_reason() -> None:
    """The text was "a task changed" for every change."""
    first = status_of(a_record(state=TaskState.STARTING))
    runs = replace(first, state=TaskState.RUNNING)
    well = replace(runs, health=Health.HEALTHY)
    ended = replace(well, state=TaskState.BACKOFF, reason="it ended with exit code 3")

    assert describe_change(first, runs) == "task web: starting → running"
    assert describe_change(runs, well) == "task web: unknown → healthy"
    assert describe_change(first, well) == "task web: starting → running, healthy"
    assert describe_change(well, ended) == "task web: running → backoff (it ended with exit code 3)"
    assert (
        describe_change(well, replace(well, generation=9)) == "task web: generation 9 is requested"
    )


class Journal:
    """A fake journald; tests read the received messages on demand."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.lines: list[str] = []

    def read(self) -> list[str]:
        """Return the lines of all messages that have arrived."""
        while True:
            try:
                self.lines += self._socket.recv(1 << 16).decode().splitlines()
            except BlockingIOError:
                return self.lines

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Journal]:
    """Make this process log to a journald as under systemd."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    found = Journal(tmp_path / "journal.sock")
    monkeypatch.setattr(ours, "_JOURNAL_SOCKET", tmp_path / "journal.sock")
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    ours.configure("twine-agent")
    yield found
    root.handlers[0].close()
    root.handlers[:] = handlers
    root.setLevel(level)
    found.close()


@pytest.mark.behaviour("BUG-AG16")
async def test_journald_gets_the_sentence_and_the_fields(host: FakeHost, journal: Journal) -> None:
    """`journalctl -u twine-agent` showed nothing useful."""
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        journal.read()
        await client.delete_task("web")
        await gone(client, "web")

    lines = journal.read()
    changes = [line for line in lines if line.startswith("MESSAGE=task web: ")]
    assert changes[0] == "MESSAGE=task web: accepted → running, healthy"
    assert changes[1] == "MESSAGE=task web: running → stopping (a stop was requested)"
    assert changes[-1] == "MESSAGE=task web: stopped and removed"
    assert lines.count("TWINE_TASK=web") >= 3


def test_a_journald_that_hangs_costs_lines_and_no_time(journal: Journal) -> None:
    """journald's socket takes few datagrams; the next one would block the event loop."""
    log = logging.getLogger("agent.test")
    for number in range(5000):
        log.info("line %d", number)
    arrived = sum(line.startswith("MESSAGE=line") for line in journal.read())
    log.info("after it")

    assert 0 < arrived < 5000
    assert journal.read()[-1] == f"TWINE_LINES_LOST={5000 - arrived}"
