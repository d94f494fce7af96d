"""A command of the lab that is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vm_lab.errors import LabError
from vm_lab.exclusive import lab_lock
from vm_lab.state import LabPaths

HOLDS = """
import sys, time
from pathlib import Path
from vm_lab.exclusive import lab_lock
from vm_lab.state import LabPaths
with lab_lock(LabPaths("lab", Path(sys.argv[1]), Path(sys.argv[2])), "up"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.behaviour("BUG-LB4")
def test_a_killed_command_leaves_no_lock(tmp_path: Path) -> None:
    paths = LabPaths("lab", tmp_path / "state", tmp_path / "run")
    argv = [sys.executable, "-c", HOLDS, str(paths.state_root), str(paths.run_root)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LabError, match=str(holder.pid)), lab_lock(paths, "down"):
            pass
        holder.kill()
        holder.wait()
    assert paths.lock.exists()
    with lab_lock(paths, "down"):
        pass
    assert not paths.run_root.exists()
