"""`sidekick list | head -1`: a reader that goes away is no failure, and nothing is said of it."""

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
    """Text that is kept until the end fails there, text that is not at its first line."""
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
