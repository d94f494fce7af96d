"""The output that tasks write into their pipes reaches the journal of their entitlement."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.runtime import output_copier
from agent.runtime.core.output_lines import BURST_LINES, DROPPED, LINE_BYTES
from agent.runtime.output_copier import OutputCopier, totals

EXACT = b"\n\na  \r\n<3>x\n\x00\xff z\n\t\n" + b"y" * (LINE_BYTES + 5) + b"\nlast\n"


class Journal:
    """The socket of a journal, and the entries that it received."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listen()

    def listen(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self.socket.bind(str(self.path))

    def entries(self) -> list[dict[str, bytes]]:
        found: list[dict[str, bytes]] = []
        while True:
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                return found
            entries = list(_parsed(data))
            assert len(entries) == 1, "of several in a datagram journald 257 keeps the first alone"
            found += entries

    def messages(self) -> list[bytes]:
        return [found["MESSAGE"] for found in self.entries()]


def _parsed(data: bytes) -> Iterator[dict[str, bytes]]:
    one: dict[str, bytes] = {}
    while data:
        line, _, data = data.partition(b"\n")
        if not line:
            yield one
            one = {}
        elif b"=" in line:
            name, _, value = line.partition(b"=")
            one[name.decode()] = value
        else:
            (size,) = struct.unpack_from("<Q", data)
            one[line.decode()], data = data[8 : 8 + size], data[9 + size :]
    yield one


class Host:
    """A folder of pipes with one task's, its journal, and a copier that tests run step by step."""

    def __init__(self, top: Path) -> None:
        self.folder = top / "output"
        self.pipe = self.folder / "local" / "web"
        self.pipe.parent.mkdir(parents=True)
        os.mkfifo(self.pipe)
        self.units = top / "units"
        self.units.mkdir()
        self.template = str(top / "{}" / "socket")
        self.journal = Journal(top / "local" / "socket")
        self.copier = self.copies()

    def copies(self) -> OutputCopier:
        return OutputCopier(self.folder, self.template, self.units)

    def turned(self) -> list[bytes]:
        """Run the copier until no more messages arrive; return the messages.

        A datagram socket holds few datagrams (net.unix.max_dgram_qlen), so the rest waits.
        """
        found: list[bytes] = []
        quiet = 0
        self.copier._wait_s = lambda _: 0.0  # type: ignore[method-assign]
        while quiet < 5:
            self.copier.run_once()
            more = self.journal.messages()
            quiet = 0 if more else quiet + 1
            found += more
        return found


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.copier.close()
    found.journal.socket.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(output_copier.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.behaviour("BUG-AG34")
def test_a_log_equals_the_written_bytes(host: Host) -> None:
    """journald's streams drop empty lines, blanks and CR at the end, and break at NUL."""
    host.turned()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(EXACT)
        found = host.turned()
    long = b"y" * (LINE_BYTES + 5)
    lines = [b"", b"", b"a  \r", b"<3>x", b"\x00\xff z", b"\t"]
    assert found == [*lines, long[:LINE_BYTES], long[LINE_BYTES:], b"last"]


@pytest.mark.behaviour("BUG-AG39")
def test_the_output_can_be_opened_by_name_and_the_order_holds(host: Host) -> None:
    """With a socket, `echo x > /dev/stdout` fails with ENXIO."""
    host.turned()
    script = "echo a; echo b >/dev/stdout; echo c >>/dev/stderr; echo d >&2; printf e"
    with host.pipe.open("wb", buffering=0) as out:
        subprocess.run(["/bin/sh", "-c", script], stdout=out, stderr=out, check=True)
    assert host.turned() == [b"a", b"b", b"c", b"d", b"e"]


def test_entries_name_unit_and_run_of_the_task(host: Host) -> None:
    link = host.units / "invocation:twine-task-web.service"
    found = []
    for run in ("1" * 32, "2" * 32):
        link.unlink(missing_ok=True)
        link.symlink_to(run)
        host.turned()
        with host.pipe.open("wb", buffering=0) as out:
            out.write(b"x\nend without a newline")
        for _ in range(5):
            host.copier.run_once()
            found += host.journal.entries()
    assert [e["OBJECT_SYSTEMD_INVOCATION_ID"][:1] for e in found] == [b"1", b"1", b"2", b"2"]
    assert {e["OBJECT_SYSTEMD_UNIT"] for e in found} == {b"twine-task-web.service"}


@pytest.mark.behaviour("BUG-AG34")
def test_a_killed_copier_loses_no_output_and_ends_no_task(host: Host) -> None:
    """systemd holds a reading end of the pipe; the next copier continues with it."""
    host.turned()
    (pipe,) = host.copier._pipes.values()
    kept = os.dup(pipe.fd)  # what systemd does (FDSTORE=1)
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"one\n")
        assert host.turned() == [b"one"]
        host.copier.close()
        out.write(b"two\n")  # without a reader: SIGPIPE
        host.copier = host.copies()
        host.copier.adopt([(pipe.name, kept)])
        assert host.turned() == [b"two"]
        out.write(b"three\n")
    assert host.turned() == [b"three"]


def test_a_removed_pipe_is_read_to_its_end_and_closed(host: Host) -> None:
    host.turned()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"one\n")
        host.pipe.unlink()
        host.copier._next_scan = 0.0
        assert host.turned() == [b"one"]
        out.write(b"last words")
        assert host.copier._pipes
    assert host.turned() == [b"last words"]
    assert not host.copier._pipes


@pytest.mark.behaviour("BUG-AG42")
def test_lines_above_the_rate_are_counted_and_reported(host: Host, clock: list[float]) -> None:
    """The log and the facts of the machine report how many lines are missing."""
    host.turned()
    found: list[bytes] = []
    with host.pipe.open("wb", buffering=0) as out:
        for _ in range(BURST_LINES // 1000 + 3):
            out.write(b"x\n" * 1000)
            found += host.turned()
        clock[0] += 11.0
        found += host.turned()
        out.write(b"again\n")
        found += host.turned()
    assert found.count(b"x") == BURST_LINES
    assert found[BURST_LINES:] == [b"Suppressed 3000 lines: more than 10,000 in 10 s", b"again"]
    assert totals(host.folder) == [3000, 0]


@pytest.mark.behaviour("BUG-AG67")
def test_output_is_copied_while_the_counts_cannot_be_written(
    host: Host, clock: list[float]
) -> None:
    """For instance on a full /run; the counts are written with the next missing line."""
    host.turned()
    blocked = host.folder / ".lost.new"
    blocked.mkdir()
    with host.pipe.open("wb", buffering=0) as out:
        for number in (1, 2):
            out.write(b"x\n" * (BURST_LINES + 1))
            host.turned()
            clock[0] += 11.0
            found = host.turned()
            out.write(b"again\n")
            assert b"again" in [*found, *host.turned()]
            assert totals(host.folder) == ([0, 0] if number == 1 else [3, 0])
            if blocked.is_dir():
                blocked.rmdir()


@pytest.mark.behaviour("BUG-AG34")
def test_a_blocked_journal_delays_a_task_by_ten_seconds_at_most(
    host: Host, clock: list[float]
) -> None:
    """A task is never blocked forever because logging ended; lost lines are counted."""
    host.turned()
    host.journal.socket.close()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"a\nb\n")
        out.write(b"c\n")
        for _ in range(5):
            host.copier.run_once()
        assert totals(host.folder) == [0, 0], "it waits, and the pipe is not read"
        clock[0] += 11.0
        for _ in range(5):
            host.copier.run_once()
            clock[0] += 1.0
        assert totals(host.folder) == [0, 3]
        os.set_blocking(out.fileno(), False)
        for _ in range(20):  # more than a pipe holds: the copier reads it, and it is lost
            assert out.write(b"d" * 65535 + b"\n") == 65536
            host.copier.run_once()
        host.journal.listen()
        clock[0] += 2.0
        found = host.turned()
        out.write(b"back\n")
        found += host.turned()
    assert found[0].startswith(b"Lost ")
    assert found[-1] == b"back"
    assert totals(host.folder)[1] >= 23


@pytest.mark.behaviour("BUG-AG117")
def test_lost_lines_of_a_removed_pipe_are_counted_and_logged(
    host: Host, clock: list[float]
) -> None:
    """The pipe was forgotten while its lines waited for the journal; a task's end is common."""
    host.turned()
    host.journal.socket.close()
    with host.pipe.open("wb", buffering=0) as out:
        host.pipe.unlink()
        out.write(b"a\nlast words")
        host.copier.run_once()
        assert totals(host.folder) == [0, 0]
    clock[0] += 11.0
    for _ in range(3):
        host.copier.run_once()
        clock[0] += 2.0
    assert totals(host.folder) == [0, 2]
    host.journal.listen()
    assert host.turned() == [b"Lost 2 lines: the journal did not accept any for 10 s"]
    clock[0] += 11.0
    host.copier.run_once()
    assert not host.copier._removed


@pytest.mark.behaviour("BUG-AG117")
def test_lines_that_still_wait_when_the_copier_ends_are_counted(host: Host) -> None:
    host.turned()
    host.journal.socket.close()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"a\nb\n")
        for _ in range(3):
            host.copier.run_once()
        host.copier.close()
        assert totals(host.folder) == [0, 2]
    host.copier = host.copies()


@pytest.mark.behaviour("BUG-AG117")
def test_the_socket_of_an_entitlement_without_tasks_is_closed(
    host: Host, clock: list[float]
) -> None:
    """Each entitlement that ever had a task here kept a descriptor and its journal's socket."""
    host.turned()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"a\n")
        assert host.turned() == [b"a"]
        (journal,) = host.copier._journals.values()
        assert journal.fileno() >= 0
        host.pipe.unlink()
    for _ in range(2):
        clock[0] += 11.0
        host.turned()
    assert not host.copier._journals
    assert journal.fileno() == -1


@pytest.mark.behaviour("BUG-AG34")
def test_a_journal_that_is_back_in_time_gets_all(host: Host, clock: list[float]) -> None:
    """A restart of journald loses nothing."""
    host.turned()
    host.journal.socket.close()
    with host.pipe.open("wb", buffering=0) as out:
        out.write(b"a\n")
        for _ in range(5):
            host.copier.run_once()
        clock[0] += 5.0
        host.journal.listen()
        assert host.turned() == [b"a"]
    assert totals(host.folder) == [0, 0]


def test_the_message_about_lost_lines_is_marked_as_journalds(
    host: Host, clock: list[float]
) -> None:
    host.turned()
    with host.pipe.open("wb", buffering=0) as out:
        for _ in range(12):
            out.write(b"x\n" * 1000)
            host.turned()
    clock[0] += 11.0
    host.copier.run_once()
    (reported,) = host.journal.entries()
    assert (reported["MESSAGE_ID"], reported["N_DROPPED"]) == (DROPPED.encode(), b"2000")


@pytest.mark.behaviour("BUG-AG34")
def test_a_copier_ends_at_once_on_request(tmp_path: Path) -> None:
    """Tasks wait while the copier restarts; its next check would be in ten seconds."""
    program = (
        "import agent.runtime.output_copier as o, pathlib, sys;"
        f"o.FOLDER = pathlib.Path({str(tmp_path / 'output')!r}); o.SCAN_S = 1e6; o.main()"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as found:
        while not (tmp_path / "output" / ".wake").exists():
            assert found.poll() is None
        for _ in range(60):  # the request may come before the copier listens
            os.kill(found.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                found.wait(1.0)
                break
        found.kill()
        assert found.wait() in (0, -signal.SIGTERM), "it waited for its next look"
