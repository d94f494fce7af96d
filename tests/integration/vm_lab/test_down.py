import subprocess
from pathlib import Path

import pytest

from vm_lab.lab import Lab
from vm_lab.leftovers import check_leftovers, host_interfaces
from vm_lab.progress import Progress
from vm_lab.state import LabPaths

pytestmark = pytest.mark.root


@pytest.fixture
def lab(tmp_path):
    paths = LabPaths("test-down", tmp_path / "state", tmp_path / "run")
    lab = Lab(paths, Progress())
    paths.make()
    lab.sandbox.start_namespaces()
    yield lab
    lab.sandbox.stop()


def test_down_ends_unnamed_processes_and_verifies_it(lab):
    leftover = lab.sandbox.spawn(["sleep", "1000"], lab.paths.state / "log")
    lab.sandbox.run(["ip", "link", "add", "br-unknown", "type", "bridge"])
    before = check_leftovers(lab.paths, None, host_interfaces())
    assert any(check.found for check in before)

    after = lab.down()

    assert not any(check.found for check in after), after
    assert not is_running(leftover)
    assert not lab.paths.state_root.exists()
    assert "br-unknown" not in host_interfaces()


def test_down_finds_the_lab_of_a_killed_holder(lab):
    leftover = lab.sandbox.spawn(["sleep", "1000"], lab.paths.state / "log")
    holder = lab.sandbox.holder()
    assert holder is not None
    subprocess.run(["kill", "-9", str(holder)], check=True)

    after = lab.down()

    assert not any(check.found for check in after), after
    assert not is_running(leftover)


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
