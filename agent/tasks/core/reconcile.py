"""What is on the host against what is recorded, at the start of the agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agent.api import TaskState
from agent.runtime.core.records import TaskRecord, Wanted, key_of, task_of


@dataclass(frozen=True, slots=True)
class KnownTask:
    """What the agent knows of a task."""

    state: TaskState
    leaving: bool = False
    image: str = ""
    volumes: tuple[str, ...] = ()
    """Those on disk that it has for itself, by where they are below the state folder."""
    ports: str = ""
    """Name of the program for the ports that it may bind; empty: its network is its own."""


def leftovers(
    recorded: Collection[str],
    unreadable: Collection[str],
    units: Collection[str],
    roots: Collection[str],
) -> list[str]:
    """Return the ids of what belongs to no task, to be removed (promise P9: no orphans).

    `recorded` are the ids of known tasks. `unreadable` are ids whose record could not be read:
    their tasks run on untouched until an owner puts or deletes them (F-06).
    """
    found = {task_of(unit) for unit in units} | set(roots)
    return sorted(found - set(recorded) - set(unreadable))


def rebuilt(
    copies: Mapping[str, TaskRecord], keys: Mapping[str, str], unreadable: Collection[str]
) -> dict[str, TaskRecord]:
    """Return the records that take the place of those that cannot be read (F-06).

    `copies` is what is remembered in memory of their tasks, `keys` says from which specification
    each unit that there is was started. A copy of something else than what runs is not believed:
    that task runs on untouched until an owner speaks up. One that is being removed stays so. Of a
    record that is not there, and so is not `unreadable`, only what runs is proof that it was.
    """
    return {
        task_id: record
        for task_id, record in copies.items()
        if keys.get(task_id) == key_of(record.spec)
        or (task_id in unreadable and (record.wanted is Wanted.GONE or task_id not in keys))
    }
