"""Observes the host for the loop of a task, before it decides."""

from __future__ import annotations

from agent.identity.clone_check import CloneCheck
from agent.machine import UnitState
from agent.runtime.core.records import TaskRecord, unit_of
from agent.runtime.units import Units
from agent.tasks.core.lifecycle import ObservedTask
from agent.tasks.oomd import Oomd
from agent.tasks.shutdown import HostShutdown
from agent.tasks.storage import TaskStorage
from agent.tasks.unit import observed_unit


class TaskObserver:
    """Reads the unit and the root of a task, and whether this host may start tasks now."""

    def __init__(
        self,
        boot_id: str,
        units: Units,
        storage: TaskStorage,
        oomd: Oomd,
        shutdown: HostShutdown,
        clones: CloneCheck,
    ) -> None:
        self._boot_id, self._units, self._storage, self._oomd = boot_id, units, storage, oomd
        self.is_leaving = shutdown.now
        """Returns whether the host is about to go down: all tasks end and none starts."""
        self.start_refusal = clones.start_refusal
        """Returns why this host, perhaps a clone, must start no task now; empty: it may."""

    async def observe(self, task: TaskRecord) -> ObservedTask:
        """Return the state of a task on the host. Its root is read only without an active unit."""
        unit = await self._units.find(unit_of(task.task_id))
        if unit is not None and unit.active == "inactive" and not unit.control_group:
            unit = None  # it has ended, but systemd has not unloaded it yet
        if unit is not None and unit.active == "active":
            return self.of_active_unit(unit)
        root, leftover = await self._storage.find_root(task)
        seen = None if unit is None else await self._oomd.observed(unit, task.ended_invocation)
        return ObservedTask(seen, root=root, leftover=leftover, boot_id=self._boot_id)

    def of_active_unit(self, unit: UnitState) -> ObservedTask:
        """Return the state of a task whose unit is active; it also has a root."""
        return ObservedTask(observed_unit(unit), root=True, leftover=True, boot_id=self._boot_id)

    def unstarted(self) -> ObservedTask:
        """Return the state of a task that was never on this host: only its record exists."""
        return ObservedTask(None, root=False, leftover=True, boot_id=self._boot_id)
