"""The facts of a host that profiles can use: one flat table of names and plain values.

All facts come from text files of /proc, /sys and /etc, so a recorded tree gives the facts of the
host it was recorded on. If a host lacks something, the fact is 0, "" or an empty list: a condition
such as `nic.speed_mbps >= 25000` is then false.
"""

from __future__ import annotations

import contextlib
import math
import re

from agent.machine import HostHardware
from agent.machine.hardware import read_hardware
from agent.machine.kernelfs import KernelFs
from sidekick.cpulists import CPUS, parse_cpu_list
from sidekick.expression import Fact
from wire.errors import ConfigError, KernelFileError
from wire.toml_limits import parse_toml

FACTS = {
    "cpu.arch": "amd64 or arm64, as the package manager names it; empty if unknown",
    "cpu.count": "processors that are online",
    "cpu.cores": "cores with an online processor",
    "cpu.family": "family number of an x86 processor, else 0",
    "cpu.flags": "feature flags of the first processor",
    "cpu.model": "name of the processor",
    "cpu.model_number": "model number of an x86 processor, else 0",
    "cpu.numa_nodes": "NUMA nodes, at least 1",
    "cpu.sockets": "processor packages",
    "cpu.threads_per_core": "hardware threads that a core runs now",
    "cpu.vendor": "intel, amd, arm or other",
    "disk.count": "block devices that are no partition, loop, RAM or optical device",
    "disk.flash_count": "the number of these that do not rotate",
    "disk.names": "their names, sorted",
    "host.name": "host name",
    "host.os": "ID of /etc/os-release, such as debian",
    "host.os_version": "VERSION_ID there, such as 12",
    "host.virtual": "whether the host is a virtual machine",
    "kernel.release": "as uname -r prints it",
    "kernel.version": "its first two numbers, for comparisons: kernel.version >= [6, 1]",
    "location.datacenter": "data center of the machine, as it was joined to its region",
    "location.msb": "its main switch board, likewise",
    "location.rack": "its rack",
    "location.region": "its region",
    "location.row": "its row of racks",
    "machine.type": "the machine type that it was joined as",
    "memory.mib": "memory in MiB, rounded down: it stays the same from boot to boot",
    "memory.page_bytes": "size of a page of memory",
    "memory.total_bytes": "MemTotal, rounded down to whole MiB for the same reason",
    "nic.count": "network interfaces with a device behind them",
    "nic.names": "their names, sorted",
    "nic.queues": "receive queues of the fastest of them",
    "nic.speed_mbps": "speed of the fastest of them; 0 if unknown",
}
"""Every fact and its meaning; `sidekick facts` prints it, and lint checks names against it."""

VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "amd"}
_NET = "/sys/class/net"
LOCATION = "/etc/twine/location.toml"
"""Written by `twine-agent join`, or by hand on a host without a control plane."""
_NOT_DISKS = re.compile(r"(loop|ram|zram|sr|fd|md|dm-|nbd)\d+.*")


def read_facts(fs: KernelFs, hardware: HostHardware | None = None) -> dict[str, Fact]:
    """Return every fact of the host with these kernel files; `hardware` if it is known already."""
    hardware = hardware or read_hardware(fs)
    cpuinfo = fs.find("/proc/cpuinfo") or ""
    cores = core_count(fs) or hardware.cpu.online
    os = _os_release(fs)
    mib = hardware.memory_bytes >> 20
    disks = disk_names(fs)
    flags = (cpuinfo_of(cpuinfo, "flags") or cpuinfo_of(cpuinfo, "Features")).split()
    return {
        "cpu.arch": _arch(cpuinfo),
        "cpu.count": hardware.cpu.online,
        "cpu.cores": cores,
        "cpu.family": _number_or_0(cpuinfo_of(cpuinfo, "cpu family")),
        "cpu.flags": flags,
        "cpu.model": hardware.cpu.model,
        "cpu.model_number": _number_or_0(cpuinfo_of(cpuinfo, "model")),
        "cpu.numa_nodes": hardware.cpu.numa_nodes,
        "cpu.sockets": hardware.cpu.sockets,
        "cpu.threads_per_core": max(1, hardware.cpu.online // cores),
        "cpu.vendor": vendor_of(cpuinfo),
        "disk.count": len(disks),
        "disk.flash_count": len([d for d in disks if _is_flash(fs, d)]),
        "disk.names": disks,
        "host.name": hardware.hostname,
        "host.os": os.get("ID", ""),
        "host.os_version": os.get("VERSION_ID", ""),
        "host.virtual": "hypervisor" in flags,
        "kernel.release": hardware.kernel,
        "kernel.version": [int(n) for n in re.findall(r"\d+", hardware.kernel)[:2]],
        **read_location(fs),
        "memory.mib": mib,
        "memory.page_bytes": _page_bytes(fs),
        "memory.total_bytes": mib << 20,
        **_nic_facts(fs),
    }


def _nic_facts(fs: KernelFs) -> dict[str, Fact]:
    nics = nic_names(fs)
    fastest = max(nics, key=lambda name: _speed_mbps(fs, name), default="")
    queues = fs.names(f"{_NET}/{fastest}/queues") if fastest else []
    return {
        "nic.count": len(nics),
        "nic.names": nics,
        "nic.queues": len([queue for queue in queues if queue.startswith("rx")]),
        "nic.speed_mbps": _speed_mbps(fs, fastest) if fastest else 0,
    }


def read_location(fs: KernelFs) -> dict[str, Fact]:
    """Return the location of the machine, "" for unknown parts. Raises `ConfigError`."""
    try:
        location = parse_toml(fs.find(LOCATION) or "")
    except (ValueError, RecursionError) as e:
        raise ConfigError(
            f"{LOCATION} is not TOML: {e}", hint="`twine-agent join` writes it"
        ) from e
    names = {name: name.rpartition(".")[2] for name in FACTS if name.startswith("location.")}
    names["machine.type"] = "machine_type"
    unknown = location.keys() - names.values()
    if unknown or not all(isinstance(value, str) for value in location.values()):
        known = ", ".join(sorted(names.values()))
        raise ConfigError(f"{LOCATION} may have only {known}, each as text")
    return {fact: location.get(key, "") for fact, key in names.items()}


def vendor_of(cpuinfo: str) -> str:
    """Return the vendor of the processor."""
    if cpuinfo_of(cpuinfo, "CPU implementer"):
        return "arm"
    return VENDORS.get(cpuinfo_of(cpuinfo, "vendor_id"), "other")


def core_count(fs: KernelFs) -> int:
    """Return how many cores have a processor that is online, 0 if the kernel has no topology."""
    siblings = set()
    for name in fs.names(CPUS):
        if re.fullmatch(r"cpu\d+", name):
            siblings.add(fs.find(f"{CPUS}/{name}/topology/thread_siblings_list"))
    return len(siblings - {None})


def online_cpus(fs: KernelFs) -> list[int]:
    """Return the processors that are online."""
    return list(parse_cpu_list(fs.find(f"{CPUS}/online") or ""))


def frequency_policies(fs: KernelFs) -> list[int]:
    """Return the numbers of the frequency policies, sorted."""
    names = fs.names(f"{CPUS}/cpufreq")
    return sorted(int(n.removeprefix("policy")) for n in names if re.fullmatch(r"policy\d+", n))


def nic_names(fs: KernelFs) -> list[str]:
    """Return the interfaces with a device behind them, sorted: no bridges, no loopback."""
    return [name for name in fs.names(_NET) if fs.exists(f"{_NET}/{name}/device")]


def disk_names(fs: KernelFs) -> list[str]:
    """Return the names of the disks, sorted: block devices without partitions and virtual ones."""
    return [name for name in fs.names("/sys/block") if not _NOT_DISKS.fullmatch(name)]


def _is_flash(fs: KernelFs, disk: str) -> bool:
    return fs.find(f"/sys/block/{disk}/queue/rotational") == "0"


def _speed_mbps(fs: KernelFs, nic: str) -> int:
    # Reading it fails (EINVAL) where the link is down, and virtio reports -1.
    with contextlib.suppress(KernelFileError):
        return max(0, _number_or_0(fs.find(f"{_NET}/{nic}/speed") or ""))
    return 0


def cpuinfo_of(cpuinfo: str, key: str) -> str:
    """Return the value of a key of the first processor, "" if it has none."""
    # The kernel puts a tab after each of these keys; an expression for each would cost a run more.
    _, _, rest = f"\n{cpuinfo}".partition(f"\n{key}\t")
    return rest.partition("\n")[0].partition(":")[2].strip()


def _number_or_0(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d+", text) else 0


def _arch(cpuinfo: str) -> str:
    if cpuinfo_of(cpuinfo, "CPU implementer"):
        return "arm64"
    return "amd64" if "lm" in cpuinfo_of(cpuinfo, "flags").split() else ""


def _page_bytes(fs: KernelFs) -> int:
    # A huge page is one page table's worth of 8-byte entries: page * (page / 8). No other file of
    # /sys or /proc has the size, except those of single processes.
    size = _number_or_0(fs.find("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") or "")
    return math.isqrt(size * 8) or 4096


def _os_release(fs: KernelFs) -> dict[str, str]:
    pairs = (line.partition("=") for line in (fs.find("/etc/os-release") or "").splitlines())
    return {key: value.strip("\"'") for key, _, value in pairs}
