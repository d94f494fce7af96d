"""Limits tasks to the huge pages that they requested (docs/resources.md).

A task that requests huge pages gets a limit of its own before it starts. While such a task exists,
the slices of all other tasks allow no huge pages. The limits in force are only read from the
kernel's files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from agent.api import TaskSpec
from agent.machine import Cgroups
from agent.resources.core.huge_pages import (
    bounds,
    command,
    refusal,
    unlimited,
    with_page_limits,
    zero_limits,
)
from agent.runtime.core.records import TaskRecord, has_huge_pages
from agent.runtime.core.slices import TASKS_SLICE, cgroup_of, is_without_pages, slice_for
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from wire.errors import HostError

_UNIT = "twine-pages.service"
_LONGEST_S = 60.0


class HugePages(TaskStage):
    """The huge pages of this machine and the limits of its tasks."""

    def __init__(
        self,
        units: Units,
        cgroups: Cgroups,
        lanes: Lanes,
        pools: Callable[[], Mapping[int, int]],
        *,
        controller: bool,
    ) -> None:
        """`pools` returns the number of pages by size; `controller`: whether the kernel can limit
        them.
        """
        self._units, self._cgroups, self._lanes = units, cgroups, lanes
        self._read_pools, self._controller = pools, controller
        self._pools: Mapping[int, int] = {}
        self._has_no_limits = not controller
        """Whether no slice has a limit, as far as this agent knows."""
        self._wanted: Callable[[], dict[str, TaskSpec]] = dict
        self._is_over: Callable[[str], bool] = lambda _: False
        self._lock = asyncio.Lock()

    def connect(
        self, wanted: Callable[[], dict[str, TaskSpec]], is_over: Callable[[str], bool]
    ) -> None:
        """Set the functions that return the specifications of all wanted tasks, and whether a task
        is over and so has no pages.
        """
        self._wanted, self._is_over = wanted, is_over

    def _in_use(self) -> dict[str, TaskSpec]:
        return {t: spec for t, spec in self._wanted().items() if not self._is_over(t)}

    def _is_requested(self) -> bool:
        return any(has_huge_pages(spec) for spec in self._in_use().values())

    def refresh(self) -> int:
        """Read the pools, which the host profile can change; return their size in bytes."""
        # Not in a lane: reading these kernel files costs less than a call in another thread.
        self._pools = self._read_pools()
        return sum(size * count for size, count in self._pools.items())

    def refusal(self, spec: TaskSpec, others: Mapping[str, TaskSpec]) -> str:
        """Return why a task cannot have its pages, empty if it can."""
        return refusal(spec, others.values(), self._pools, controller=self._controller)

    def properties(self, task: TaskRecord, unit: dict[str, object]) -> dict[str, object]:
        """Return the unit with a first step that sets the limits of its pages."""
        return with_page_limits(unit, self.values(task.spec))

    def values(self, spec: TaskSpec) -> dict[str, str]:
        """Return the required values of a task's cgroup files; empty for a task without pages."""
        return bounds(spec, self._pools) if has_huge_pages(spec) else {}

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Before a task starts, keep all other tasks off the requested pages.

        Raises `HostError` if the machine no longer has enough pages, for instance after a boot.
        Raises it also if other tasks cannot be limited, for instance because they use some.
        """
        if not self._has_no_limits or self._is_requested():
            async with self._lock:
                await self._limit_others(task.task_id, task.spec)
        return task

    async def _limit_others(self, task_id: str, spec: TaskSpec) -> None:
        if not self._is_requested():
            return await self._remove_limits()
        self.refresh()
        wanted = self._wanted()
        others = {t: other for t, other in self._in_use().items() if t != task_id}
        if why := self.refusal(spec, others):
            raise HostError(why)
        self._has_no_limits = False
        values = zero_limits(self._pools)
        slices = await self._slices()
        soon = {slice_for(s) for s in (spec, *wanted.values())} - slices.keys()
        for name in sorted(filter(is_without_pages, soon)):
            await self._write(command("", values), name)
            slices[name] = await self._read(name, values)
        for name, read in slices.items():
            if read != values:
                await self._write(command(f"{TASKS_SLICE}/{name}", values))
                if await self._read(name, values) != values:
                    raise HostError(f"{name} can still use huge pages")

    async def limit(self, task_id: str, spec: TaskSpec) -> None:
        """Apply the limits to a running task; pages that it already uses cannot be taken away."""
        if values := self.values(spec):
            group = cgroup_of(task_id, spec)
            if await self._lanes.run("usage", self._cgroups.values, group, list(values)) != values:
                async with self._lock:
                    await self._write(command(group, values))

    async def ended(self, task_id: str) -> None:  # noqa: ARG002
        """Remove the limits of all slices once no task requests pages."""
        if not self._has_no_limits and not self._is_requested():
            async with self._lock:
                await self._remove_limits()

    async def _remove_limits(self) -> None:
        self.refresh()
        values = unlimited(self._pools)
        for name, read in (await self._slices()).items():
            if read and read != values:
                await self._write(command(f"{TASKS_SLICE}/{name}", values))
        self._has_no_limits = not self._is_requested()

    async def _write(self, argv: list[str], of_slice: str = "") -> None:
        """Run a command that writes limits; with `of_slice` inside that slice, which may be new."""
        if of_slice:
            argv = [*argv[:2], _IN_SLICE + argv[2], *argv[3:]]
        properties: dict[str, object] = {
            "Description": "Twine: limits of huge pages",
            "Type": "exec",
            "ExecStart": [argv],
            "Slice": of_slice or "system.slice",
            "RemainAfterExit": True,
            "CollectMode": "inactive",
        }
        end = await self._units.run(_UNIT, properties, timeout_s=_LONGEST_S)
        if end.result != "success" or end.exit_code or end.exit_signal:
            where = argv[4] or of_slice
            raise HostError(
                f"the limits of huge pages of {PurePosixPath(where).name} cannot be "
                "written: more are in use there, or the controller is off",
                hint=f"journalctl -u {_UNIT}",
            )

    async def _slices(self) -> dict[str, dict[str, str]]:
        """Return the limits of each slice whose tasks have no pages, by its name."""
        names = await self._lanes.run("usage", self._cgroups.children, TASKS_SLICE)
        files = zero_limits(self._pools)
        return {n: await self._read(n, files) for n in names if is_without_pages(n)}

    async def _read(self, name: str, files: Mapping[str, str]) -> dict[str, str]:
        group = f"{TASKS_SLICE}/{name}"
        return await self._lanes.run("usage", self._cgroups.values, group, list(files))


_IN_SLICE = 'IFS=: read -r _ _ own </proc/self/cgroup; shift; set -- "${own%/*}" "$@"; '
"""Shell code before the script that uses the unit's own slice as the cgroup to limit."""
