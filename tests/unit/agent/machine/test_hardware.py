"""Reading the hardware from recorded trees of /proc and /sys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.machine.hardware import KEPT, read_cores, read_hardware
from agent.machine.kernelfs import KernelFs
from wire.cpus import Core, cpu_list_text, parse_cpu_list
from wire.errors import KernelFileError


def a_host(root: Path, changes: dict[str, str | None] | None = None) -> KernelFs:
    """Write the files of a host with two sockets; None leaves a file out."""
    files: dict[str, str | None] = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9654\n",
        "proc/meminfo": "MemTotal:        2048 kB\nMemFree:         1 kB\n",
        "proc/sys/kernel/osrelease": "6.12.1-cloud-amd64\n",
        "proc/sys/kernel/random/boot_id": "3f0f8d2c-8d9b-4dd4-a7a4-a1f3bb2c1c11\n",
        "proc/sys/kernel/hostname": "m1\n",
        "sys/devices/system/cpu/online": "0-2,4\n",
        "sys/devices/system/cpu/cpu0/topology/physical_package_id": "0\n",
        "sys/devices/system/cpu/cpu1/topology/physical_package_id": "0\n",
        "sys/devices/system/cpu/cpu2/topology/physical_package_id": "1\n",
        "sys/devices/system/cpu/cpu3/online": "0\n",
        "sys/devices/system/cpu/cpu4/topology/physical_package_id": "1\n",
        "sys/devices/system/cpu/cpufreq/boost": "1\n",
        "sys/devices/system/node/node0/meminfo": "",
        "sys/devices/system/node/node1/meminfo": "",
        "sys/class/net/lo/ifindex": "1\n",
        "sys/class/net/eth1/ifindex": "3\n",
        "sys/class/net/eth0/ifindex": "2\n",
        "sys/class/net/bonding_masters": "\n",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
    }
    for name, text in (files | (changes or {})).items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return KernelFs(root)


def test_sockets_and_numa_nodes_are_counted_and_offline_cpus_are_not(tmp_path: Path) -> None:
    hardware = read_hardware(a_host(tmp_path))

    assert hardware.cpu.model == "AMD EPYC 9654"
    assert (hardware.cpu.online, hardware.cpu.sockets, hardware.cpu.numa_nodes) == (4, 2, 2)
    assert hardware.memory_bytes == 2048 * 1024
    assert hardware.nics == ("eth0", "eth1")
    assert hardware.cgroup_controllers == ("cpuset", "cpu", "io", "memory", "pids")
    assert (hardware.kernel, hardware.hostname) == ("6.12.1-cloud-amd64", "m1")


def test_a_kernel_without_numa_or_cgroup_v2_has_one_node_and_no_controllers(
    tmp_path: Path,
) -> None:
    fs = a_host(
        tmp_path,
        {
            "sys/devices/system/node/node0/meminfo": None,
            "sys/devices/system/node/node1/meminfo": None,
            "sys/fs/cgroup/cgroup.controllers": None,
        },
    )

    assert read_hardware(fs).cpu.numa_nodes == 1
    assert read_hardware(fs).cgroup_controllers == ()


def test_an_unnamed_processor_is_called_by_its_architecture(tmp_path: Path) -> None:
    fs = a_host(tmp_path, {"proc/cpuinfo": "processor\t: 0\n"})

    assert read_hardware(fs).cpu.model


def test_a_kernel_that_hides_its_memory_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(KernelFileError, match="MemTotal"):
        read_hardware(a_host(tmp_path, {"proc/meminfo": "nothing\n"}))


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-3", 4), ("0-3,8", 5), ("1,3,5-6", 4)])
def test_a_kernel_list_counts_each_number(text: str, count: int) -> None:
    assert len(parse_cpu_list(text)) == count
    assert cpu_list_text(parse_cpu_list(text)) == text


@pytest.mark.behaviour("BUG-AG4")
def test_memory_taken_as_huge_pages_of_any_size_is_known(tmp_path: Path) -> None:
    pools = "sys/kernel/mm/hugepages/hugepages"
    fs = a_host(
        tmp_path, {f"{pools}-2048kB/nr_hugepages": "3\n", f"{pools}-1048576kB/nr_hugepages": "2\n"}
    )
    assert read_hardware(fs).hugepages_bytes == (3 << 21) + (2 << 30)


def test_cores_are_read_with_what_of_them_is_not_for_tasks(tmp_path: Path) -> None:
    """Each core has two CPUs: CPUs 0-3 are two cores of node 0, CPUs 4-7 two of node 1.

    CPU 1 serves interrupts and is not in the slice of all tasks. CPU 6 was isolated at boot. CPU 7
    is offline.
    """
    cpu, node = "sys/devices/system/cpu", "sys/devices/system/node"
    pairs = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4-5", 5: "4-5", 6: "6"}
    files = {f"{cpu}/cpu{n}/topology/thread_siblings_list": f"{p}\n" for n, p in pairs.items()}
    files |= {
        f"{cpu}/online": "0-6\n",
        f"{cpu}/isolated": "6\n",
        f"{node}/node0/cpulist": "0-3\n",
        f"{node}/node1/cpulist": "4-7\n",
        "sys/fs/cgroup/workload.slice/cpuset.cpus.effective": "0,2-6\n",
    }
    assert read_cores(a_host(tmp_path, files)) == (
        Core((0,), 0, others=(1,)),
        Core((2, 3), 0),
        Core((4, 5), 1),
        Core((), 1, others=(6,)),
    )


def test_a_kernel_without_topology_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    missing = ("online", "isolated", "cpu0/topology/thread_siblings_list")
    fs = a_host(tmp_path, {f"sys/devices/system/cpu/{name}": None for name in missing})
    assert read_cores(fs) == (Core((0,)),)


@pytest.mark.behaviour("F-84")
def test_a_unit_with_processes_only_in_proc_reads_its_files(tmp_path: Path) -> None:
    """The agent has `ProcSubset=pid`; the files that it reads are bound at another path."""
    whole = read_hardware(a_host(tmp_path / "whole"))
    fs = a_host(tmp_path / "apart")
    (tmp_path / "apart/run/twine-kernel").mkdir(parents=True)
    (tmp_path / "apart/proc").rename(tmp_path / "apart/run/twine-kernel/proc")
    assert read_hardware(fs) == whole
    (tmp_path / "apart/run/twine-kernel/proc/meminfo").unlink()
    with pytest.raises(KernelFileError, match="cannot read /proc/meminfo"):
        read_hardware(fs)


@pytest.mark.behaviour("F-84")
def test_the_unit_is_given_every_file_of_proc_that_is_read() -> None:
    """A missing file would end the agent at its start."""
    root = Path(__file__).parents[4] / "agent"
    code = (root / "machine/hardware.py").read_text()
    read = set(re.findall(r'_proc\(fs, "(/proc/\S+)"\)', code))
    unit = (root / "units/twine-agent.service").read_text()
    bound = dict(re.findall(r"^BindReadOnlyPaths=(\S+):(\S+)$", unit, re.MULTILINE))
    assert len(read) == 5
    assert bound == {path: KEPT + path for path in read}


@pytest.mark.behaviour("BUG-HT27")
@pytest.mark.parametrize(
    "unit", ["agent/units/twine-agent.service", "control_plane/units/twine-control-plane.service"]
)
def test_a_service_that_holds_keys_leaves_no_core(unit: str) -> None:
    """A core dump would hold keys and the credentials of tasks."""
    root = Path(__file__).parents[4]
    lines = (root / unit).read_text().splitlines()
    assert "LimitCORE=0" in lines
