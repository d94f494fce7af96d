"""Shows a task's unit: the requested properties next to those that systemd reports."""

from __future__ import annotations

import msgspec

from agent.api.unit import UnitProperty, UnitShown
from agent.machine import Processes
from agent.runtime.core.records import TaskRecord, unit_of
from agent.runtime.offload import Lanes
from agent.tasks.unit import UnitOfTask

_VALUE_MAX = 60_000
"""Maximum length of a shown value in characters, below the limit of a field in the API."""


class UnitView:
    """Reads units with `systemctl show`, in the `usage` lane."""

    def __init__(self, processes: Processes, lanes: Lanes, unit_of_task: UnitOfTask) -> None:
        self._processes, self._lanes, self._unit_of_task = processes, lanes, unit_of_task

    async def show(self, task: TaskRecord) -> UnitShown:
        """Return all properties of a task's unit, sorted by name."""
        unit, wanted = unit_of(task.task_id), self._unit_of_task(task)
        in_force = await self._lanes.run("usage", self._read, unit, sorted(wanted))
        return UnitShown(
            unit=unit,
            properties=[
                UnitProperty(
                    name=name,
                    wanted=msgspec.json.encode(wanted[name]).decode()[:_VALUE_MAX],
                    in_force=in_force.get(name, "")[:_VALUE_MAX],
                )
                for name in sorted(wanted)
            ],
        )

    def _read(self, unit: str, names: list[str]) -> dict[str, str]:
        command = ["systemctl", "show", f"--property=LoadState,{','.join(names)}", unit]
        lines = self._processes.run(command, timeout_s=10).stdout.splitlines()
        values = dict(line.split("=", 1) for line in lines if "=" in line)
        return values if values.get("LoadState") == "loaded" else {}
