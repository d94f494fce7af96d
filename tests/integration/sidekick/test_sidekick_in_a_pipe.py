"""`sidekick list | head -1`: a reader that goes away is no failure, and nothing is said of it."""

from __future__ import annotations

import os
import subprocess
import sys


def test_nobody_who_reads_only_the_first_lines_is_told_of_it() -> None:
    command = [sys.executable, "-m", "sidekick", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
