"""The timer's check runs as in its unit: in a bare interpreter without our packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidekick import look

PROGRAM = ("/bin/echo", "the", "program")
ALONE = (sys.executable, "-I", "-S")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder whose record has the value of one file."""
    value, folder = tmp_path / "value", tmp_path / "state"
    folder.mkdir()
    value.write_text("7\n")
    (folder / look.LOCK).touch()
    report = b'{"at": %s, "uptime_s": %s}\n' % (look.AT, look.UPTIME)
    parts = [
        look.encode_record(look.TEXT, bytes(value), b"7"),
        look.encode_record(look.MISSING, bytes(tmp_path / "none"), b""),
        look.encode_record(look.NAMES, bytes(folder), b"lock\nseen"),
        look.encode_record(look.REPORT, b"", report),
    ]
    (folder / look.READS).write_bytes(look.HEAD + bytes(folder) + b"\n" + b"".join(parts))
    return folder


def run(state: Path) -> str:
    argv = [*ALONE, look.__file__, str(state), *PROGRAM]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.behaviour("F-72", "HP15")
def test_it_renews_the_report_and_starts_nothing(state: Path) -> None:
    assert run(state) == ""
    text = (state / look.STATUS).read_bytes()
    assert look.AT not in text
    assert look.UPTIME not in text


@pytest.mark.behaviour("F-72")
@pytest.mark.parametrize("what", ["value", "none", "state/more", "state/seen", "state/lock"])
def test_it_becomes_the_program_where_anything_changed(state: Path, what: str) -> None:
    path = state.parent / what
    if what in ("state/seen", "state/lock"):
        path.unlink()
    else:
        path.write_text("8\n")
    assert run(state) == "the program\n"
    assert not (state / look.STATUS).exists()


def test_an_interface_that_is_not_there_answers_nothing(state: Path) -> None:
    part = look.encode_record(look.ANSWER, b"none0 16 8", bytes(32))
    kept = state / look.READS
    kept.write_bytes(kept.read_bytes().replace(b"r 0 ", part + b"r 0 "))
    assert run(state) == "the program\n"


@pytest.mark.root
def test_an_interface_is_queried_as_in_the_full_check(state: Path) -> None:
    """The kernel does not allow scatter-gather to be switched off for `lo`."""
    part = look.encode_record(look.ANSWER, b"lo 24 1", (1).to_bytes(4, sys.byteorder))
    kept = state / look.READS
    kept.write_bytes(kept.read_bytes().replace(b"r 0 ", part + b"r 0 "))
    assert run(state) == ""


def test_startup_searches_no_module_on_the_disk() -> None:
    """The look imports only modules that every interpreter has loaded, which makes it cheap."""
    script = (
        "import sys; before = {*sys.modules}; sys.path.insert(0, sys.argv[1]); import look;"
        "print(*sorted({*sys.modules} - before))"
    )
    argv = [*ALONE, "-c", script, str(Path(look.__file__).parent)]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    frozen = {"os", "os.path", "stat", "_stat", "posixpath", "genericpath", "_collections_abc"}
    assert {*found} <= {"look", "time"} | frozen
