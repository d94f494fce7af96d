"""Applies the limits of a task: in its unit at the start, and to the running unit."""

from __future__ import annotations

from agent.machine import Cgroups
from agent.resources.core.exclusive_cpus import allowed_cpus, exclusive_cpu_values
from agent.resources.core.limits import (
    kernel_values,
    live_properties,
    missing_files,
    not_in_force,
    on_devices,
)
from agent.resources.exclusive_cpus import ExclusiveCpus
from agent.resources.huge_pages import HugePages
from agent.runtime.core.records import TaskRecord, unit_of
from agent.runtime.core.slices import cgroup_of
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from wire.errors import HostError


class TaskLimits(TaskStage):
    """Applies limits through systemd, and confirms them from the kernel's files."""

    def __init__(
        self,
        units: Units,
        cgroups: Cgroups,
        lanes: Lanes,
        cpus: ExclusiveCpus,
        pages: HugePages,
        page_bytes: int,
    ) -> None:
        """`cpus` and `pages` provide those limits that depend on the host."""
        self._units, self._cgroups, self._lanes = units, cgroups, lanes
        self._cpus, self._pages, self._page_bytes = cpus, pages, page_bytes

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with the kernel's name for each block device that has a limit."""
        disks = self._cgroups.disks() if task.spec.resources.io else {}
        return on_devices(unit, disks)

    async def resize(self, task: TaskRecord) -> TaskRecord:
        """Apply the limits to a running unit; raises `HostError` if they are not in force."""
        spec = task.spec
        disks = await self._lanes.run("usage", self._cgroups.disks)
        properties = on_devices(live_properties(spec, task.resources), disks)
        all_cpus = self._cpus.all_cpus()
        properties |= allowed_cpus(task.own_cpus, task.resources, spec, all_cpus)
        await self._units.limit(unit_of(task.task_id), properties)
        await self._pages.limit(task.task_id, spec)
        proved = exclusive_cpu_values(task.own_cpus) | self._pages.values(spec)
        wanted, group = (
            kernel_values(spec, self._page_bytes) | proved,
            cgroup_of(task.task_id, spec),
        )
        read = await self._lanes.run("usage", self._cgroups.values, group, list(wanted))
        if wrong := not_in_force(wanted, read) or missing_files(proved, read):
            raise HostError(f"the limits of task {task.task_id} are not in force: {wrong}")
        await self._cpus.confirm(task.task_id)
        return task
