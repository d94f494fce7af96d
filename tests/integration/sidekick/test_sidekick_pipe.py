"""`sidekick list | head -1` succeeds without a message when the reader closes the pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", [["list"], ["facts"], ["plan", "web"], ["list", "--help"]])
def test_a_reader_of_only_the_first_lines_gets_no_error(
    words: list[str], buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffered output fails at the end, unbuffered output at its first line."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    command = [sys.executable, "-m", "sidekick", *words]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 0
