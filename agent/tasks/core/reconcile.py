"""What is on the host against what is recorded, at the start of the agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agent.api import TaskState
from agent.runtime.core.records import TaskRecord, Wanted, key_of, task_of


@dataclass(frozen=True, slots=True)
class KnownTask:
    """What the agent's record has of a task."""

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

    `copies` are the copies of their records in memory. `keys` maps each existing unit to the key of
    the specification it was started from. A copy that differs from the running unit is not used:
    that task runs on untouched until an owner sends a request. One that is being removed stays so.
    For a missing record, which is not `unreadable`, only a running unit proves that it existed.
    """
    return {
        task_id: record
        for task_id, record in copies.items()
        if keys.get(task_id) == key_of(record.spec)
        or (task_id in unreadable and (record.wanted is Wanted.GONE or task_id not in keys))
    }
