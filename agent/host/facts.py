"""Reads the facts of this machine in the form of the API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agent.api import MachineFacts
from agent.api.credentials import CONFIGURATION
from agent.api.own_init import CAPABILITY, NESTED
from agent.machine import HostAccess
from agent.tasks.core.own_init import missing
from sidekick.profile import PROFILES, Library


def installed_profiles() -> tuple[str, ...]:
    """Return the names of the host profiles that sidekick finds on this host. Reads folders."""
    return tuple(Library(PROFILES, {}).names())


@cache
def agent_version() -> str:
    """Return the version of this distribution."""
    try:
        return version("twine-cluster")
    except PackageNotFoundError:
        return "unknown"


class FactsReader:
    """Reads the present facts of one machine. Blocking: call it through a lane."""

    def __init__(self, machine: HostAccess, state_dir: str, *, own_init: bool = False) -> None:
        """`own_init`: the agent's configuration allows tasks with their own init."""
        self._machine, self._state_dir, self._own_init = machine, state_dir, own_init
        self._systemd = 0

    def read(self, name: str) -> MachineFacts:
        """Return the facts; `name` is the machine's name in the control plane, or empty.

        systemd's version is read once. On a busy host systemd answers late, and a caller that
        checks whether the agent lives must not wait for it.
        """
        self._systemd = self._systemd or self._machine.systemd.version()
        hardware = self._machine.hardware()
        size, free = self._machine.btrfs.free_bytes(Path(self._state_dir))
        return MachineFacts(
            machine_id=name or hardware.hostname,
            boot_id=hardware.boot_id,
            kernel=hardware.kernel,
            cpu_model=hardware.cpu.model,
            cpus=hardware.cpu.online,
            sockets=hardware.cpu.sockets,
            numa_nodes=hardware.cpu.numa_nodes,
            memory_bytes=hardware.memory_bytes,
            hugepages_bytes=hardware.hugepages_bytes,
            disk_bytes=size,
            disk_free_bytes=free,
            nics=list(hardware.nics),
            agent_version=agent_version(),
            capabilities=self._capabilities(hardware.cgroup_controllers),
            profiles=installed_profiles(),
        )

    def _capabilities(self, controllers: Sequence[str]) -> list[str]:
        capabilities = [f"systemd-{self._systemd}", "btrfs", CONFIGURATION]
        if controllers:
            capabilities += ["cgroup-v2", *(f"cgroup-{controller}" for controller in controllers)]
        if self._systemd >= 257:
            capabilities.append("private-pids")
        if not missing(self._own_init, self._machine.has_program):
            capabilities += [CAPABILITY, NESTED]
        return capabilities
