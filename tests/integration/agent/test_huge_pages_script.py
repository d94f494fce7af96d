"""The script that limits huge pages, on folders that emulate cgroups (docs/resources.md)."""

from __future__ import annotations

import subprocess
from pathlib import Path

from agent.resources.core.huge_pages import command


def test_the_script_enables_the_controller_from_the_top_down_and_then_writes(
    tmp_path: Path,
) -> None:
    group = "/workload.slice/workload-a.slice/twine-task-x.service"
    (tmp_path / group.lstrip("/")).mkdir(parents=True)
    argv = command(group, {"hugetlb.2MB.max": "4194304"})
    argv[2] = argv[2].replace("/sys/fs/cgroup", str(tmp_path))
    subprocess.run(argv, check=True)
    above = ["", "workload.slice", "workload.slice/workload-a.slice"]
    for folder in above:
        assert (tmp_path / folder / "cgroup.subtree_control").read_text() == "+hugetlb\n"
    assert not (tmp_path / group.lstrip("/") / "cgroup.subtree_control").exists()
    assert (tmp_path / group.lstrip("/") / "hugetlb.2MB.max").read_text() == "4194304\n"
    argv = command("/no/such", {"hugetlb.2MB.max": "0"})
    argv[2] = argv[2].replace("/sys/fs/cgroup", str(tmp_path / "nowhere"))
    assert subprocess.run(argv, check=False, capture_output=True).returncode
