"""What each task uses of the host, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Callable

from agent.api import TaskSpec
from agent.machine import Cgroups
from agent.runtime.core.slices import cgroup_of
from agent.runtime.offload import Lanes
from agent.tasks.tasks import HostTasks
from agent.usage import TaskUsage, Usages


class UsageReader:
    """Reads the cgroups of all tasks that run, in a lane of its own."""

    def __init__(
        self, cgroups: Cgroups, tasks: HostTasks, lanes: Lanes, boottime_s: Callable[[], float]
    ) -> None:
        """Read nothing yet."""
        self._cgroups, self._tasks, self._lanes = cgroups, tasks, lanes
        self._boottime_s = boottime_s

    async def read(self) -> Usages:
        """Return what all tasks use that have processes, sorted by id."""
        specs = self._tasks.specs()
        wanted = [(s.task_id, specs[s.task_id]) for s in self._tasks.all() if s.task_id in specs]
        return await self._lanes.run("usage", self._read, wanted)

    def _read(self, wanted: list[tuple[str, TaskSpec]]) -> Usages:
        at, found = self._boottime_s(), list[TaskUsage]()
        for task_id, spec in wanted:
            used = self._cgroups.read(cgroup_of(task_id, spec))
            if used is None:
                continue
            found.append(
                TaskUsage(
                    task_id=task_id,
                    cpu_s=used.cpu_s,
                    throttled_s=used.throttled_s,
                    memory_bytes=used.memory_bytes,
                    memory_peak_bytes=used.memory_peak_bytes,
                    oom_kills=used.oom_kills,
                    read_bytes=used.read_bytes,
                    written_bytes=used.written_bytes,
                    processes=used.processes,
                    cpu_pressure=used.cpu_pressure,
                    memory_pressure=used.memory_pressure,
                    io_pressure=used.io_pressure,
                )
            )
        return Usages(at_boot_s=at, tasks=found)
