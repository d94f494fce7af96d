"""Records which tasks are on which machine, from the job records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.api.job_changes import task_changes
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, task_id


@dataclass(frozen=True, slots=True)
class PlacedTask:
    """One task on a machine, or one that must still be removed from it."""

    job: str
    leaving: bool = False
    """The task moved away and must be removed."""
    lost: bool = False
    """The machine is down; the task moves as soon as there is room."""


_NONE: Mapping[str, PlacedTask] = {}
"""The tasks of a machine without tasks: a query must not add an entry."""


class TaskDirectory:
    """Tasks by machine, according to the stored job records."""

    def __init__(self) -> None:
        """Start empty; the caller calls `settle` for each record."""
        self._on: dict[str, dict[str, PlacedTask]] = {}
        self._listeners: list[Callable[[list[str]], None]] = []

    def listen(self, listener: Callable[[list[str]], None]) -> None:
        """Call `listener(machines)` after each change, with the machines whose tasks changed."""
        self._listeners.append(listener)

    def settle(self, job: str, before: JobRecord | None, after: JobRecord | None) -> list[str]:
        """Update a job's entries from its record; return the machines that changed.

        `before` is the record of the last call, or an equal one.
        """
        found = set()
        for (machine, task), entry in _changed_entries(job, before, after).items():
            if self._on.get(machine, _NONE).get(task) == entry:
                continue
            found.add(machine)
            if entry is None:
                del self._on[machine][task]
            else:
                self._on.setdefault(machine, {})[task] = entry
        changed = sorted(found)
        for listener in self._listeners if changed else ():
            listener(changed)
        return changed

    def tasks(self, machine: str) -> Mapping[str, PlacedTask]:
        """Return the tasks of a machine, by id."""
        return self._on.get(machine, _NONE)

    def jobs(self, machine: str) -> set[str]:
        """Return the jobs that have tasks on a machine."""
        return {placed.job for placed in self.tasks(machine).values()}

    def leaving(self, machine: str) -> list[str]:
        """Return tasks that must be gone before the machine takes new ones."""
        return [task for task, placed in self.tasks(machine).items() if placed.leaving]


def _changed_entries(
    job: str, before: JobRecord | None, after: JobRecord | None
) -> dict[tuple[str, str], PlacedTask | None]:
    """Return (machine, task) → its new entry, None if it is no longer there."""
    found: dict[tuple[str, str], PlacedTask | None] = {}
    for old, task in task_changes(before, after):
        was, now = _place(old), _place(task)
        if was == now:
            continue
        if old is not None and was is not None:
            found[was[0], task_id(job, old.index)] = None
        if task is not None and now is not None:
            found[now[0], task_id(job, task.index)] = PlacedTask(job, lost=now[1])
    left = after.leaving if after is not None else {}
    if before is not None and before.leaving != left:
        placed = _placed(job, after)
        for machine, ids in before.leaving.items():
            found |= {(machine, name): placed.get((machine, name)) for name in ids}
    for machine, ids in left.items():
        found |= {(machine, name): PlacedTask(job, leaving=True) for name in ids}
    return found


def _placed(job: str, record: JobRecord | None) -> dict[tuple[str, str], PlacedTask]:
    tasks = record.tasks if record is not None else ()
    places = ((task_id(job, task.index), _place(task)) for task in tasks)
    return {(at[0], name): PlacedTask(job, lost=at[1]) for name, at in places if at is not None}


def _place(task: TaskRecord | None) -> tuple[str, bool] | None:
    """Return the machine of a task, and whether it is lost there."""
    if task is None or task.placement is None:
        return None
    return task.placement.machine, task.phase is TaskPhase.LOST
