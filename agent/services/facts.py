"""What this machine has, in the words of the API."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agent.api import MachineFacts
from agent.machine import Machine


def agent_version() -> str:
    """Return the version of this distribution."""
    try:
        return version("twine-cluster")
    except PackageNotFoundError:
        return "unknown"


def machine_facts(machine: Machine, name: str, state_dir: str) -> MachineFacts:
    """Return the machine's facts; `name` is its name in the control plane, else the host's."""
    hardware = machine.hardware()
    size, free = machine.btrfs.free_bytes(Path(state_dir))
    systemd = machine.systemd.version()
    capabilities = [f"systemd-{systemd}", "btrfs"]
    if hardware.cgroup_controllers:
        capabilities += ["cgroup-v2", *(f"cgroup-{c}" for c in hardware.cgroup_controllers)]
    if systemd >= 257:
        capabilities.append("private-pids")
    return MachineFacts(
        machine_id=name or hardware.hostname,
        boot_id=hardware.boot_id,
        kernel=hardware.kernel,
        cpu_model=hardware.cpu.model,
        cpus=hardware.cpu.online,
        sockets=hardware.cpu.sockets,
        numa_nodes=hardware.cpu.numa_nodes,
        memory_bytes=hardware.memory_bytes,
        disk_bytes=size,
        disk_free_bytes=free,
        nics=list(hardware.nics),
        agent_version=agent_version(),
        capabilities=capabilities,
    )
