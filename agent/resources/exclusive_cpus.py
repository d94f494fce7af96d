"""Gives tasks CPUs of their own, and keeps all other tasks off them (docs/resources.md).

The record of a task has its CPUs. `AllowedCPUs` of the other tasks' slices keeps these tasks off;
systemd changes it while they run, and a later slice starts with it. A change counts once the
kernel's own files show it (docs/adr/0099).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from agent.api import TaskSpec
from agent.machine import Cgroups
from agent.resources.core.exclusive_cpus import (
    CpusInUse,
    choose_cpus,
    is_still_valid,
    online_cpus,
    refusal,
    shared_cpus,
    sharing_refusal,
)
from agent.runtime.core.records import TaskRecord
from agent.runtime.core.slices import TASKS_SLICE, is_shared_slice, slice_for
from agent.runtime.offload import Lanes
from agent.runtime.stage import TaskStage
from agent.runtime.units import Units
from wire.cpus import Core, cpu_list_text, parse_cpu_list
from wire.errors import HostError

_EFFECTIVE = "cpuset.cpus.effective"


class ExclusiveCpus(TaskStage):
    """The CPUs of tasks that have CPUs of their own."""

    def __init__(
        self,
        units: Units,
        cgroups: Cgroups,
        lanes: Lanes,
        cores: Callable[[], tuple[Core, ...]],
        mark: Path,
    ) -> None:
        """`adopt` loads the tasks, `refresh` the cores.

        `mark` is a file in memory. It exists if an agent has changed slices since the boot.
        """
        self._mark, self._has_changed_slices = mark, mark.exists()
        self._units, self._cgroups, self._lanes = units, cgroups, lanes
        self._read_cores = cores
        self._cores: tuple[Core, ...] = ()
        self._claims: dict[str, tuple[int, ...]] = {}
        """Task → the CPUs chosen for it, until it is removed."""
        self._reserved: dict[str, tuple[int, ...]] = {}
        """Task → the CPUs that other tasks are kept off, because the task may have processes."""
        self._set: dict[str, tuple[int, ...]] = {}
        """Slice → the CPUs that this agent has set last."""
        self._room = True
        """Whether a CPU is left for tasks without CPUs of their own."""
        self._wanted: Callable[[], dict[str, TaskSpec]] = dict
        self._lock = asyncio.Lock()

    def connect(self, wanted: Callable[[], dict[str, TaskSpec]]) -> None:
        """Set the function that returns the specifications of all wanted tasks."""
        self._wanted = wanted

    def adopt(self, records: Iterable[TaskRecord]) -> None:
        """Load the CPUs that an earlier agent gave to tasks, and keep other tasks off them."""
        given = {r.task_id: tuple(r.own_cpus) for r in records if r.own_cpus}
        self._claims |= given
        self._reserved |= given

    async def refresh(self) -> None:
        """Read the cores that tasks may use now; the host profile can change them."""
        self._cores = await self._lanes.run("usage", self._read_cores)

    async def refresh_for(self, spec: TaskSpec) -> None:
        """Read the cores if the admission of a task needs them, because some CPUs are exclusive."""
        if not self._cores or self._claims or spec.resources.exclusive_cpus:
            await self.refresh()

    def refusal(
        self, task_id: str, spec: TaskSpec, others: Mapping[str, TaskSpec], cpuset: bool
    ) -> str:
        """Return why a task cannot have the CPUs that it requests, empty if it can.

        `others` are all other wanted tasks; `cpuset`: whether the kernel has the cpuset controller.
        """
        count = spec.resources.exclusive_cpus
        if not count:
            return sharing_refusal(self._cores, self._own(others), spec.resources.cpus)
        if not cpuset:
            return f"resources.exclusive_cpus {count}: its kernel has no cpuset controller"
        return refusal(self._cores, self._cpus_in_use(others), count, self._claims.get(task_id, ()))

    def choose(self, task_id: str, spec: TaskSpec, others: Mapping[str, TaskSpec]) -> list[int]:
        """Choose CPUs for an admitted task, and remember them as its own.

        A task that no longer requests any keeps its CPUs until its unit is gone.
        """
        had, count = self._claims.get(task_id, ()), spec.resources.exclusive_cpus
        if count and not (had and is_still_valid(self._cores, had, count)):
            taken = self._cpus_in_use(others)
            busy = taken.own | taken.pinned
            leaving = {c for task, own in self._reserved.items() if task != task_id for c in own}
            cpus = choose_cpus(self._cores, busy | leaving, count, had)
            self._claims[task_id] = cpus or choose_cpus(self._cores, busy, count, had)
        return list(self._claims.get(task_id, ()))

    def _cpus_in_use(self, others: Mapping[str, TaskSpec]) -> CpusInUse:
        return CpusInUse(
            own=self._own(others),
            pinned=frozenset(cpu for spec in others.values() for cpu in spec.resources.cpus),
            sharing=sum(not spec.resources.exclusive_cpus for spec in others.values()),
        )

    def _own(self, others: Mapping[str, TaskSpec]) -> frozenset[int]:
        return frozenset(c for task, cpus in self._claims.items() if task in others for c in cpus)

    def restore(self, task_id: str, own: Sequence[int]) -> None:
        """Undo a choice that could not be saved."""
        self._claims[task_id] = tuple(own)
        if not own:
            del self._claims[task_id]

    async def ensure(self, task: TaskRecord) -> TaskRecord:
        """Return the task with its own CPUs, once no other task can run there; see `confirm`."""
        return replace(task, own_cpus=await self._claim(task.task_id, task.spec))

    resize = ensure  # until `confirm` the task also keeps its former CPUs

    async def _claim(self, task_id: str, spec: TaskSpec) -> list[int]:
        """Return the task's own CPUs once no other task can run there; see `confirm`.

        Raises `HostError` if they are not free now, or other tasks may still use them.
        """
        name = slice_for(spec)
        is_settled = not self._has_changed_slices or (name in self._set and self._room)
        if is_shared_slice(name) and task_id not in self._claims and is_settled:
            return []
        async with self._lock:
            await self.refresh()
            if not spec.resources.exclusive_cpus:
                self._claims.pop(task_id, None)
                self._reserved.pop(task_id, None)
                await self._apply()
                if not shared_cpus(self._cores, self._all_reserved()):
                    raise HostError("it waits for a CPU: all are still exclusive to other tasks")
                return []
            others = {t: other for t, other in self._wanted().items() if t != task_id}
            own = tuple(self.choose(task_id, spec, others))
            if not own:
                raise HostError(self.refusal(task_id, spec, others, cpuset=True))
            for other, cpus in self._reserved.items():
                if other != task_id and set(own) & set(cpus):
                    raise HostError(f"task {other} has not released CPUs {cpu_list_text(own)} yet")
            self._reserved[task_id] = tuple(sorted({*own, *self._reserved.get(task_id, ())}))
            await self._apply()
            return list(own)

    async def confirm(self, task_id: str) -> None:
        """Release a task's former CPUs, now that its unit runs on the new ones only."""
        async with self._lock:
            own = self._claims.get(task_id, ())
            if self._reserved.get(task_id, own) != own:
                self._reserved[task_id] = own
                await self._apply()

    async def ended(self, task_id: str) -> None:
        """Allow other tasks on the CPUs of an ended task; the claim on them stays."""
        async with self._lock:
            if self._reserved.pop(task_id, None) is not None:
                await self._apply()

    def forget(self, task_id: str) -> None:
        """Drop the claim of a removed task."""
        self._claims.pop(task_id, None)

    def all_cpus(self) -> tuple[int, ...]:
        """Return all CPUs of the machine at the last `refresh`."""
        return tuple(sorted(online_cpus(self._cores)))

    def _all_reserved(self) -> frozenset[int]:
        return frozenset(cpu for cpus in self._reserved.values() for cpu in cpus)

    async def _apply(self) -> None:
        """Keep the slices of tasks that share CPUs off reserved CPUs, and allow them the rest.

        A list of all CPUs removes the limit; an empty list is accepted by systemd but has no
        effect.
        """
        reserved = self._all_reserved()
        self._room = bool(shared_cpus(self._cores, reserved))
        if not self._has_changed_slices:
            await self._lanes.run("usage", self._mark.touch)
            self._has_changed_slices = True
        slices = await self._lanes.run("usage", self._slices)
        if not self._room:
            return self._require_empty(slices)
        allowed = tuple(sorted(online_cpus(self._cores) - reserved))
        soon = {slice_for(spec) for spec in self._wanted().values()}
        for name in sorted({*slices, *self._set, *filter(is_shared_slice, soon)}):
            if self._set.get(name) != allowed:
                await self._units.limit(name, {"AllowedCPUs": allowed})
                self._set[name] = allowed
        for name, (effective, _) in (await self._lanes.run("usage", self._slices)).items():
            if both := reserved.intersection(effective):
                self._set.pop(name, None)
                raise HostError(f"{name} may still use CPUs {cpu_list_text(both)}")
        return None

    def _require_empty(self, slices: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
        for name, (_, populated) in slices.items():
            if populated:
                raise HostError(f"the last tasks of {name} must end before it gets all CPUs")

    def _slices(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the CPUs of each slice with sharing tasks, and whether it has processes."""
        slices = {}
        for name in filter(is_shared_slice, self._cgroups.children(TASKS_SLICE)):
            values = self._cgroups.values(f"{TASKS_SLICE}/{name}", [_EFFECTIVE, "cgroup.events"])
            populated = "populated 1" in values.get("cgroup.events", "")
            slices[name] = (parse_cpu_list(values.get(_EFFECTIVE, "")), populated)
        return slices
