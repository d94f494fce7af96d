"""Which tasks are on which machine, by name: kept from the job records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.api.jobs import JobRecord, TaskPhase, task_id


@dataclass(frozen=True, slots=True)
class Entry:
    """One task on a machine, or one that must still be removed from it."""

    job: str
    leaving: bool = False
    """It moved away and must be removed."""
    lost: bool = False
    """Its machine is down; it goes elsewhere as soon as there is room."""


_NONE: Mapping[str, Entry] = {}
"""Of a machine without tasks: to ask of one must not make an entry for it."""


class TaskDirectory:
    """Tasks per machine, as the stored job records say."""

    def __init__(self) -> None:
        """Start empty; `settle` is called for each record."""
        self._on: dict[str, dict[str, Entry]] = {}
        self._of: dict[str, dict[tuple[str, str], Entry]] = {}

    def settle(self, job: str, record: JobRecord | None) -> list[str]:
        """Make a job's entries exactly those of its record; return machines that changed."""
        entries = _entries(record) if record is not None else {}
        known = self._of.pop(job, {})
        changed = set()
        for machine, task in known.keys() - entries.keys():
            del self._on[machine][task]
            changed.add(machine)
        for key, placed in entries.items():
            if known.get(key) != placed:
                machine, task = key
                self._on.setdefault(machine, {})[task] = placed
                changed.add(machine)
        if record is not None:
            self._of[job] = entries
        return sorted(changed)

    def tasks(self, machine: str) -> Mapping[str, Entry]:
        """Return the tasks of a machine, by id."""
        return self._on.get(machine, _NONE)

    def jobs(self, machine: str) -> set[str]:
        """Return the jobs that have tasks on a machine."""
        return {placed.job for placed in self.tasks(machine).values()}

    def leaving(self, machine: str) -> list[str]:
        """Return tasks that must be gone before the machine takes new ones."""
        return [task for task, placed in self.tasks(machine).items() if placed.leaving]


def _entries(record: JobRecord) -> dict[tuple[str, str], Entry]:
    entries: dict[tuple[str, str], Entry] = {}
    for task in record.tasks:
        if task.placement is not None:
            key = (task.placement.machine, task_id(record.name, task.index))
            entries[key] = Entry(record.name, lost=task.phase is TaskPhase.LOST)
    for machine, ids in record.leaving.items():
        for name in ids:
            entries[(machine, name)] = Entry(record.name, leaving=True)
    return entries
