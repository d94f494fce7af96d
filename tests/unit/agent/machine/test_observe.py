"""Cgroups, namespaces, links and mounts of Twine, as read from the kernel's files."""

from __future__ import annotations

from pathlib import Path

from agent.machine import KernelObjects
from agent.machine.census import observe
from agent.machine.kernelfs import KernelFs

MOUNTS = """22 1 0:20 / / rw - btrfs /dev/vda rw
30 22 0:21 / /var/lib/twine rw - btrfs /dev/vda rw
31 30 0:22 / /var/lib/twine/a\\040b rw - tmpfs tmpfs rw
32 22 0:23 / /run/twine/netns/web rw - nsfs nsfs rw
33 22 0:24 / /var/lib/twine-other rw - tmpfs tmpfs rw
"""


def test_cgroups_namespaces_links_and_mounts_of_ours_are_found(tmp_path: Path) -> None:
    top = tmp_path / "sys/fs/cgroup/workload.slice"
    (top / "workload-x.slice/twine-task-web.service/inner.service").mkdir(parents=True)
    (top / "workload-x.slice/other.service").mkdir()
    for name, alias in (("tw0123456789a", "web\n"), ("eth0", "up"), ("twine", "")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "ifalias").write_text(alias)
    (tmp_path / "run/twine/netns").mkdir(parents=True)
    (tmp_path / "run/twine/netns/web").touch()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)

    assert observe(KernelFs(tmp_path), Path("/var/lib/twine"), Path("/run/twine")) == KernelObjects(
        cgroups=("/workload.slice/workload-x.slice/twine-task-web.service",),
        namespaces=("web",),
        veths={"tw0123456789a": "web"},
        mounts=("/run/twine/netns/web", "/var/lib/twine/a b"),
    )


def test_a_host_that_has_none_of_it_is_empty(tmp_path: Path) -> None:
    assert observe(KernelFs(tmp_path), Path("/s"), Path("/r")) == KernelObjects()
