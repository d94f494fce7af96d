"""Programs that a demo starts in the lab's network end with the demo."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DEMO = """
import sys, time
from pathlib import Path
from vm_lab.demo import Demo
demo = Demo("ends")
demo._bin, demo._folder = Path(sys.argv[1]), Path(sys.argv[1])
print(demo._start_in_lab("sleep", "1000", pipes=True).pid, flush=True)
demo._start_program("sleep", "1000")
print(demo._programs[0].pid, flush=True)
time.sleep(1000)
"""
EXEC = """
import sys
from types import SimpleNamespace
from vm_lab import cli
cli.require_root = lambda: None
cli.open_lab = lambda name: SimpleNamespace(
    sandbox=SimpleNamespace(command=lambda argv: list(argv)),
    paths=SimpleNamespace(ssh=SimpleNamespace(mkdir=lambda **_: None)),
)
cli.main([*sys.argv[1:]])
"""


def a_lab_command(folder: Path) -> None:
    """Write a `twine-lab` without a lab: its `exec` enters no namespace."""
    file = folder / "twine-lab"
    file.write_text(f"#!{sys.executable}\n{EXEC}")
    file.chmod(0o755)


def test_exec_becomes_the_program_so_that_signals_reach_it(tmp_path: Path) -> None:
    a_lab_command(tmp_path)
    words = [str(tmp_path / "twine-lab"), "exec", "--", "sh", "-c", "echo $$; exec sleep 1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert int(started.stdout.readline()) == started.pid
        started.terminate()
    assert started.returncode == -signal.SIGTERM


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_programs_of_a_demo_end_with_it_however_it_ends(
    tmp_path: Path, how: signal.Signals
) -> None:
    a_lab_command(tmp_path)
    words = [sys.executable, "-c", DEMO, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as demo:
        programs = [psutil.Process(pid) for pid in printed_numbers(demo, 2)]
        os.kill(demo.pid, how)
    _, alive = psutil.wait_procs(programs, timeout=60)
    for program in alive:
        program.kill()
    assert not alive


def printed_numbers(demo: subprocess.Popen[bytes], count: int) -> list[int]:
    """Return the numbers that the demo prints next to its commands."""
    found: list[int] = []
    assert demo.stdout is not None
    while len(found) < count:
        line = demo.stdout.readline().strip()
        assert line or demo.poll() is None
        found += [int(line)] if line.isdigit() else []
    return found
