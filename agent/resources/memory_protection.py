"""Has the slices of tasks keep the memory that their tasks were promised (docs/adr/0117).

The kernel protects nothing in a cgroup beyond what those above it protect. What is in force is read
from the kernel's own files alone: an earlier agent may have set it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from agent.api import TaskSpec
from agent.machine import Cgroups
from agent.resources.core.limits import not_in_force
from agent.resources.core.memory_protection import KEPT_FILES, files, is_kept, kept_in_slices
from agent.runtime.core.records import TaskRecord
from agent.runtime.core.slices import TASKS_SLICE
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from wire.errors import HostError, TwineError

log = logging.getLogger(__name__)

Kept = dict[str, dict[str, int]]


class MemoryProtection(TaskStage):
    """What the slices of this machine keep, by slice."""

    def __init__(self, units: Units, cgroups: Cgroups, lanes: Lanes) -> None:
        """See `follow`."""
        self._units, self._cgroups, self._lanes = units, cgroups, lanes
        self._specs: Callable[[], Mapping[str, TaskSpec]] = dict
        self._in_force: Kept | None = None
        """What this agent has last seen to; None: it has not looked yet."""
        self._lock = asyncio.Lock()

    def follow(self, specs: Callable[[], Mapping[str, TaskSpec]]) -> None:
        """Set the function that returns the specifications of all tasks with a promise."""
        self._specs = specs

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Return once the slices keep what all tasks together were promised."""
        await self._hold()
        return task

    async def resize(self, task: TaskRecord) -> TaskRecord:
        """As `ensure`."""
        return await self.ensure(task)

    async def _hold(self) -> None:
        """Return once the slices keep what all tasks together were promised.

        Raises `HostError` where the kernel does not.
        """
        if self._in_force == kept_in_slices(self._specs().values()):
            return
        async with self._lock:
            wanted = kept_in_slices(self._specs().values())
            read = await self._lanes.run("usage", self._read)
            for name in sorted({*wanted, *filter(lambda n: is_kept(read[n]), read)}):
                kept = wanted.get(name) or dict.fromkeys(KEPT_FILES, 0)
                if read.get(name) != files(kept):
                    await self._units.limit(name, kept)
            read = await self._lanes.run("usage", self._read)
            for name, kept in wanted.items():
                # A slice that does not run yet has no files, and starts with these values.
                if wrong := not_in_force(files(kept), read.get(name, {})):
                    raise HostError(f"the memory protection of {name} is not in force: {wrong}")
            self._in_force = wanted

    async def ended(self, task_id: str) -> None:  # noqa: ARG002
        """Give back what was kept for tasks that are gone or over; what fails the next one does."""
        try:
            await self._hold()
        except TwineError as e:
            log.warning(
                "memory is still protected for a task that is gone or exceeds its promise",
                extra={"why": str(e)},
            )

    def _read(self) -> dict[str, dict[str, str]]:
        """Return what the slice of all tasks, and those below, keep now."""
        top = TASKS_SLICE.removeprefix("/")
        names = [n for n in self._cgroups.children(TASKS_SLICE) if n.endswith(".slice")]
        groups = {top: TASKS_SLICE} | {name: f"{TASKS_SLICE}/{name}" for name in names}
        wanted = list(KEPT_FILES.values())
        found = {name: self._cgroups.values(group, wanted) for name, group in groups.items()}
        return {name: values for name, values in found.items() if values}
