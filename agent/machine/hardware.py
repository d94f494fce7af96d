"""Hardware of the host, read only from /proc and /sys."""

from __future__ import annotations

import os
import re

from agent.machine import Cpu, HostHardware
from agent.machine.kernelfs import KernelFs
from wire.cpus import Core, parse_cpu_list
from wire.errors import KernelFileError

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
TASKS_SLICE = "/workload.slice"
HUGEPAGES = "/sys/kernel/mm/hugepages"
KEPT = "/run/twine-kernel"
"""Folder with the files of /proc that the agent reads (units/twine-agent.service)."""
_MODEL_KEYS = ("model name", "Processor", "cpu model")
"""Keys of /proc/cpuinfo that name the processor: x86, old Arm, MIPS; arm64 has none."""


def read_hardware(fs: KernelFs) -> HostHardware:
    """Return the processor, memory and interfaces of the host.

    Raises `KernelFileError` if a file is missing that every Linux has.
    """
    return HostHardware(
        cpu=_cpu(fs),
        memory_bytes=_memory_bytes(fs),
        kernel=_proc(fs, "/proc/sys/kernel/osrelease"),
        boot_id=_proc(fs, "/proc/sys/kernel/random/boot_id"),
        hostname=_proc(fs, "/proc/sys/kernel/hostname"),
        nics=tuple(name for name in fs.names("/sys/class/net") if _is_nic(fs, name)),
        hugepages_bytes=sum(size * count for size, count in read_hugepages(fs).items()),
        page_bytes=os.sysconf("SC_PAGESIZE"),
        cgroup_controllers=tuple((fs.find("/sys/fs/cgroup/cgroup.controllers") or "").split()),
    )


def _proc(fs: KernelFs, path: str) -> str:
    """Return a file of /proc, also in a unit whose /proc has only processes (ProcSubset=)."""
    found = fs.find(path)
    kept = fs.find(KEPT + path) if found is None else found
    return fs.read(path) if kept is None else kept


def _cpu(fs: KernelFs) -> Cpu:
    names = [name for name in fs.names(CPUS) if re.fullmatch(r"cpu\d+", name)]
    # A CPU that is offline has no topology folder (Documentation/admin-guide/cputopology.rst).
    packages = [fs.find(f"{CPUS}/{name}/topology/physical_package_id") for name in names]
    online = fs.find(f"{CPUS}/online")
    return Cpu(
        model=_cpu_model(fs),
        online=len(parse_cpu_list(online)) if online else max(1, len(names)),
        sockets=max(1, len({package for package in packages if package is not None})),
        numa_nodes=max(1, len(_nodes(fs))),
    )


def _nodes(fs: KernelFs) -> list[str]:
    return [name for name in fs.names(NODES) if re.fullmatch(r"node\d+", name)]


def read_cores(fs: KernelFs) -> tuple[Core, ...]:
    """Return the cores that are online, by their first CPU.

    CPUs outside `workload.slice` are excluded: sidekick's `[affinity]` reserves them for
    interrupts. CPUs without load balancing (`isolcpus=`) are excluded, too: the kernel does not
    move processes between them. Only tasks that name such a CPU use it.
    """
    online = parse_cpu_list(fs.find(f"{CPUS}/online") or "0")
    tasks = fs.find(f"/sys/fs/cgroup{TASKS_SLICE}/cpuset.cpus.effective")
    usable = set(online if tasks is None else parse_cpu_list(tasks)).intersection(online)
    usable -= set(parse_cpu_list(fs.find(f"{CPUS}/isolated") or ""))
    nodes = {
        cpu: int(name.removeprefix("node"))
        for name in _nodes(fs)
        for cpu in parse_cpu_list(fs.find(f"{NODES}/{name}/cpulist") or "")
    }
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in online:
        siblings = fs.find(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        cores.setdefault(parse_cpu_list(siblings), []).append(cpu)
    return tuple(
        Core(
            tuple(cpu for cpu in cpus if cpu in usable),
            nodes.get(cpus[0], 0),
            tuple(cpu for cpu in cpus if cpu not in usable),
        )
        for cpus in cores.values()
    )


def _cpu_model(fs: KernelFs) -> str:
    text = _proc(fs, "/proc/cpuinfo")
    for key in _MODEL_KEYS:
        found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found[1].strip()
    return os.uname().machine


_X86_LEVELS = (
    "cx16 lahf_lm pni popcnt sse4_1 sse4_2 ssse3",
    "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "avx512bw avx512cd avx512dq avx512f avx512vl",
)
"""The kernel's names of the features that x86-64-v2, v3 and v4 add (x86-64 psABI)."""


def read_x86_level(fs: KernelFs) -> int:
    """Return the x86-64 level that the processor supports: 1 to 4; 1 for other processors."""
    found = re.search(r"^flags\s*:\s*(.+)$", _proc(fs, "/proc/cpuinfo"), re.MULTILINE)
    flags = set(found[1].split()) if found else set[str]()
    level = 1
    for words in _X86_LEVELS:
        if not flags.issuperset(words.split()):
            break
        level += 1
    return level


def _memory_bytes(fs: KernelFs) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _proc(fs, "/proc/meminfo"), re.MULTILINE)
    if not found:
        raise KernelFileError("cannot read the memory size: /proc/meminfo has no MemTotal line")
    return int(found[1]) * 1024


def read_hugepages(fs: KernelFs) -> dict[int, int]:
    """Return the number of huge pages by size in bytes (admin-guide/mm/hugetlbpage.rst)."""
    counts: dict[int, int] = {}
    for name in fs.names(HUGEPAGES):
        size = re.fullmatch(r"hugepages-(\d+)kB", name)
        pages = fs.find(f"{HUGEPAGES}/{name}/nr_hugepages") if size else None
        if size and pages is not None:
            counts[int(size[1]) * 1024] = int(pages)
    return counts


def _is_nic(fs: KernelFs, name: str) -> bool:
    # With the bonding module, /sys/class/net also has the plain file `bonding_masters`.
    return name != "lo" and fs.exists(f"/sys/class/net/{name}/ifindex")
