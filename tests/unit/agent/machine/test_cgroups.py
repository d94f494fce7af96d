"""The resource usage of a cgroup, read from files as a kernel of Debian 13 writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.machine import Usage
from agent.machine.cgroups import ROOT, HostCgroups
from agent.machine.kernelfs import KernelFs
from wire.errors import KernelFileError

GROUP = "/workload.slice/workload-demo.slice/twine-task-web.service"
FILES = {
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\nsystem_usec 2\nnr_periods 9\nnr_throttled 3\n"
    "throttled_usec 750000\nnr_bursts 0\nburst_usec 0\n",
    "memory.current": "20971520\n",
    "memory.peak": "33554432\n",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n",
    "io.stat": "254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n"
    "7:0 rbytes=1024 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n8:0\n",
    "pids.current": "4\n",
    "cpu.pressure": "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "io.pressure": "some avg10=99.00 avg60=0.00 avg300=0.00 total=0\n",
}


def _cgroups(root: Path, files: dict[str, str]) -> HostCgroups:
    folder = root / f"{ROOT}{GROUP}".lstrip("/")
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return HostCgroups(KernelFs(root))


def test_everything_the_kernel_counts_is_read(tmp_path: Path) -> None:
    assert _cgroups(tmp_path, FILES).read(GROUP) == Usage(
        cpu_s=2.5,
        throttled_s=0.75,
        memory_bytes=20 << 20,
        memory_peak_bytes=32 << 20,
        oom_kills=1,
        read_bytes=5120,
        written_bytes=8192,
        processes=4,
        cpu_pressure=0.125,
        memory_pressure=0.0,
        io_pressure=0.99,
    )


@pytest.mark.parametrize("missing", sorted(set(FILES) - {"cpu.stat"}))
def test_a_controller_that_is_off_counts_nothing(tmp_path: Path, missing: str) -> None:
    found = _cgroups(tmp_path, {k: v for k, v in FILES.items() if k != missing}).read(GROUP)

    assert found is not None
    assert found.cpu_s == 2.5


def test_a_cgroup_that_is_gone_is_none(tmp_path: Path) -> None:
    assert _cgroups(tmp_path, FILES).read("/workload.slice/other") is None


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    cgroups = _cgroups(tmp_path, FILES)
    path = tmp_path / f"{ROOT}{GROUP}/memory.current".lstrip("/")
    path.unlink()
    path.mkdir()

    with pytest.raises(KernelFileError, match=r"cannot read .*memory\.current"):
        cgroups.read(GROUP)


def test_disks_are_those_that_the_kernel_has(tmp_path: Path) -> None:
    assert HostCgroups(KernelFs(tmp_path)).disks() == {}
    for name in ("vdb", "dm-0", "vda", "cciss!c0d0"):
        (tmp_path / "sys/class/block" / name).mkdir(parents=True)
    found = HostCgroups(KernelFs(tmp_path)).disks()
    assert found == {name: name for name in ("cciss/c0d0", "dm-0", "vda", "vdb")}


@pytest.mark.behaviour("AG8")
def test_a_link_to_a_disk_is_that_of_the_device_with_the_greatest_priority(tmp_path: Path) -> None:
    """udev's database has the priorities; the agent sees no other data of the links."""
    devices = {
        "sda": ("8:0", "S:disk/by-id/wwn-1\nS:disk/by-path/pci-0000:00:02.0\nE:ID=x\nV:1\n"),
        "dm-0": ("253:0", "S:disk/by-id/wwn-1\nL:50\nS:mapper/data\nG:systemd\n"),
        "sdb": ("8:16", "S:disk/by-id/wwn-1\nL:-100\n"),
        "loop0": ("7:0", None),
    }
    (tmp_path / "run/udev/data").mkdir(parents=True)
    for name, (number, words) in devices.items():
        folder = tmp_path / "sys/class/block" / name
        folder.mkdir(parents=True)
        (folder / "dev").write_text(f"{number}\n")
        if words is not None:
            (tmp_path / "run/udev/data" / f"b{number}").write_text(words)

    assert list(HostCgroups(KernelFs(tmp_path)).disks().items()) == [
        *((name, name) for name in ("dm-0", "loop0", "sda", "sdb")),
        ("disk/by-id/wwn-1", "dm-0"),
        ("disk/by-path/pci-0000:00:02.0", "sda"),
        ("mapper/data", "dm-0"),
    ]
