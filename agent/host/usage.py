"""Reads the resource use of each task, and the energy of the host, from the kernel."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import asdict

from agent.api import NetworkMode, TaskSpec
from agent.machine import Cgroups
from agent.network.core.addresses import veth_of
from agent.runtime.core.slices import cgroup_of
from agent.runtime.offload import Lanes
from agent.tasks.queries import TaskQueries
from agent.usage import TaskUsage, Usages
from wire.errors import KernelFileError

_LINKS, _ENERGY = "/sys/class/net", "/sys/class/powercap"
_SOCKETS = 8
"""The most processor packages that are read (powercap.rst numbers zones from 0)."""


class UsageReader:
    """Reads the cgroups of all running tasks, in its own lane."""

    def __init__(
        self,
        cgroups: Cgroups,
        tasks: TaskQueries,
        lanes: Lanes,
        boottime_s: Callable[[], float],
        host_text: Callable[[str], str],
    ) -> None:
        """`host_text` returns a file of the host, empty if there is none."""
        self._host_text = host_text
        self._cgroups, self._tasks, self._lanes = cgroups, tasks, lanes
        self._boottime_s = boottime_s

    async def read(self) -> Usages:
        """Return the use of all tasks that have processes, sorted by id."""
        specs = self._tasks.specs()
        wanted = [(s.task_id, specs[s.task_id]) for s in self._tasks.all() if s.task_id in specs]
        return await self._lanes.run("usage", self._read, wanted)

    def _read(self, wanted: list[tuple[str, TaskSpec]]) -> Usages:
        at, usages = self._boottime_s(), list[TaskUsage]()
        for task_id, spec in wanted:
            used = self._cgroups.read(cgroup_of(task_id, spec))
            if used is None:
                continue
            network = self._network_bytes(task_id, spec)
            usages.append(TaskUsage(task_id=task_id, network_bytes=network, **asdict(used)))
        return Usages(at_boot_s=at, tasks=usages, energy_j=self._energy_j())

    def _network_bytes(self, task_id: str, spec: TaskSpec) -> int | None:
        if spec.network.mode is NetworkMode.HOST:
            return None
        folder = f"{_LINKS}/{veth_of(task_id)}/statistics"
        return self._sum([f"{folder}/rx_bytes", f"{folder}/tx_bytes"])

    def _energy_j(self) -> float | None:
        """Return the energy of all packages: their zones, without the zones of their parts."""
        zones = [f"{_ENERGY}/intel-rapl:{number}" for number in range(_SOCKETS)]
        packages = [z for z in zones if self._host_text(f"{z}/name").startswith("package")]
        energy_uj = self._sum([f"{zone}/energy_uj" for zone in packages]) if packages else None
        return None if energy_uj is None else energy_uj / 1e6

    def _sum(self, paths: list[str]) -> int | None:
        """Return the sum of numbers in files of the kernel, None if one cannot be read.

        A link that is removed during the read returns EINVAL or ENODEV (net/core/net-sysfs.c).
        """
        try:
            numbers = [self._host_text(path) for path in paths]
        except KernelFileError:
            return None
        return sum(map(int, numbers)) if all(numbers) else None
