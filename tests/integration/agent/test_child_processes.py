"""The agent runs real programs of the host, and our programs run in a real pipe."""

import itertools
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from agent.machine.process import HostProcesses
from wire.errors import ProgramError

SAYS_AND_FAILS = "echo one; echo two; echo nothing more >&2; exit 3"


def test_a_failed_program_reports_it_after_its_last_line() -> None:
    lines = iter(HostProcesses().lines(["sh", "-c", SAYS_AND_FAILS]))

    assert list(itertools.islice(lines, 2)) == [b"one\n", b"two\n"]
    with pytest.raises(ProgramError, match="failed with 3: nothing more"):
        next(lines)


def test_a_program_that_writes_much_about_its_failure_ends() -> None:
    """The output exceeds what a pipe holds; the error contains the last line."""
    lines = HostProcesses().lines(["sh", "-c", "seq 100000 >&2; exit 1"])

    with pytest.raises(ProgramError, match=r": 100000$"):
        list(lines)


def test_a_program_is_read_on_a_host_whose_disk_takes_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")

    assert list(HostProcesses().lines(["echo", "one"])) == [b"one\n"]


def test_a_program_that_is_ended_by_its_reader_has_not_failed() -> None:
    lines = HostProcesses().lines(["sh", "-c", "echo one; exec sleep 100"])
    reading = iter(lines)
    assert next(reading) == b"one\n"
    threading.Thread(target=lines.close).start()

    assert list(reading) == []


@pytest.mark.parametrize("program", ["agent.cli:main", "control_plane.cli:main"])
def test_a_disconnected_reader_is_no_failure(program: str) -> None:
    """`twine-agent logs web | head` ended with exit code 1."""
    module, _, name = program.partition(":")
    there, here = os.pipe()
    os.close(there)
    start = f"import sys; sys.argv = ['p', 'manual']; from {module} import {name}; {name}()"
    done = subprocess.run(
        [sys.executable, "-c", start], stdout=here, stderr=subprocess.PIPE, check=False
    )
    os.close(here)

    assert (done.returncode, done.stderr.decode()) == (0, "")
