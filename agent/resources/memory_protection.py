"""Protects the memory that tasks were promised, in the slices above them (docs/adr/0117).

In a cgroup the kernel protects at most as much memory as each of its parents protects. The values
in force are only read from the kernel's files, because an earlier agent may have set them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from agent.api import TaskSpec
from agent.machine import Cgroups
from agent.resources.core.limits import not_in_force
from agent.resources.core.memory_protection import (
    PROTECTION_FILES,
    files,
    is_protecting,
    protection_of_slices,
)
from agent.runtime.core.records import TaskRecord
from agent.runtime.core.slices import TASKS_SLICE
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from wire.errors import HostError, TwineError

log = logging.getLogger(__name__)

Protection = dict[str, dict[str, int]]


class MemoryProtection(TaskStage):
    """The memory protection of the slices of this machine."""

    def __init__(self, units: Units, cgroups: Cgroups, lanes: Lanes, page_bytes: int) -> None:
        """Protect nothing until `connect` is called."""
        self._units, self._cgroups, self._lanes = units, cgroups, lanes
        self._page_bytes = page_bytes
        self._specs: Callable[[], Mapping[str, TaskSpec]] = dict
        self._in_force: Protection | None = None
        """Protection that this agent confirmed last; None: none yet."""
        self._lock = asyncio.Lock()

    def connect(self, specs: Callable[[], Mapping[str, TaskSpec]]) -> None:
        """Set the function that returns the specifications of all tasks that are not over."""
        self._specs = specs

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Return once the slices protect all memory that tasks were promised."""
        await self._protect()
        return task

    resize = ensure

    async def _protect(self) -> None:
        """Set the protection of all slices; raises `HostError` if it is not in force afterwards."""
        if self._in_force == protection_of_slices(self._specs().values()):
            return
        async with self._lock:
            wanted = protection_of_slices(self._specs().values())
            read = await self._lanes.run("usage", self._read)
            for name in sorted({*wanted, *filter(lambda n: is_protecting(read[n]), read)}):
                protection = wanted.get(name) or dict.fromkeys(PROTECTION_FILES, 0)
                if read.get(name) != files(protection, self._page_bytes):
                    await self._units.limit(name, protection)
            read = await self._lanes.run("usage", self._read)
            for name, protection in wanted.items():
                # A slice that does not run yet has no files; it will start with these values.
                values = files(protection, self._page_bytes)
                if wrong := not_in_force(values, read.get(name, {})):
                    raise HostError(f"the memory protection of {name} is not in force: {wrong}")
            self._in_force = wanted

    async def ended(self, task_id: str) -> None:  # noqa: ARG002
        """Release the protection of removed and ended tasks. The next call repeats a failed one."""
        try:
            await self._protect()
        except TwineError as e:
            log.warning(
                "memory is still protected for a task that is gone or exceeds its promise",
                extra={"why": str(e)},
            )

    def _read(self) -> dict[str, dict[str, str]]:
        """Return the protection in force of the slice of all tasks and of the slices below it."""
        top = TASKS_SLICE.removeprefix("/")
        names = [n for n in self._cgroups.children(TASKS_SLICE) if n.endswith(".slice")]
        groups = {top: TASKS_SLICE} | {name: f"{TASKS_SLICE}/{name}" for name in names}
        wanted = list(PROTECTION_FILES.values())
        protections = {name: self._cgroups.values(group, wanted) for name, group in groups.items()}
        return {name: values for name, values in protections.items() if values}
