"""Keeps tasks that run without a record in a restored store from starting a second time."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.agents.core.restored import predates_restore
from control_plane.agents.region import Region
from control_plane.api.jobs import JobRecord, TaskPhase, task_id
from control_plane.api.machines import MachineState
from control_plane.scheduler.ports import Directory


class UnknownCopies:
    """Task → machines where it runs without a record; empty unless the store was restored."""

    def __init__(self, region: Region, directory: Directory) -> None:
        """Follow nothing until `begin`, which is called for a restored store."""
        self._observations, self._machines = region.observations, region.broker
        self._directory = directory
        self._where: dict[str, set[str]] = {}
        self._on: dict[str, set[str]] = {}
        self.gone: Callable[[str], None] = lambda _task: None
        """Called with a task that no longer runs on a machine where no record had it."""

    def begin(self) -> None:
        """Read the reports of all machines, and follow them from now on."""
        for machine in self._machines.table:
            self._seen(machine)
        self._observations.listen(self._seen)

    def elsewhere(self, task: str, machine: str) -> str:
        """Return another machine that is up and runs the task without a record; empty: none."""
        for other in sorted(self._where.get(task, ())):
            record = self._machines.table.find(other)
            is_up = record is not None and record.state is MachineState.UP
            if other != machine and is_up and task not in self._directory.tasks(other):
                return other
        return ""

    def waiting(self, record: JobRecord) -> str:
        """Describe which task waits for such a copy to stop; empty: none does."""
        for task in record.tasks if self._where else ():
            if task.phase is TaskPhase.STARTING and task.placement is not None:
                name = task_id(record.name, task.index)
                if other := self.elsewhere(name, task.placement.machine):
                    return (
                        f"task {name} runs on {other}, which the restored store does not "
                        "contain; it starts once that is released: twinectl restored "
                        f"stop {name} --machine {other}"
                    )
        return ""

    def _seen(self, machine: str) -> None:
        tasks, epoch = self._observations.peek(machine).tasks, self._observations.restored
        known = self._directory.tasks(machine)
        now = {
            name
            for name, status in tasks.items()
            if name not in known and predates_restore(status, epoch)
        }
        before = self._on.pop(machine, set())
        if now:
            self._on[machine] = now
        for name in now - before:
            self._where.setdefault(name, set()).add(machine)
        for name in before - now:
            left = self._where.get(name, set())
            left.discard(machine)
            if not left:
                self._where.pop(name, None)
            self.gone(name)
