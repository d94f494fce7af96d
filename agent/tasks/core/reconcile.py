"""Compares the host with the records at the start of the agent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from agent.api import TaskState
from agent.runtime.core.records import TaskRecord, Wanted, key_of, task_of


@dataclass(frozen=True, slots=True)
class KnownTask:
    """The facts from a task's record that an account of the host needs."""

    state: TaskState
    leaving: bool = False
    image: str = ""
    volumes: tuple[str, ...] = ()
    """Paths, below the state folder, of the volumes on disk that only this task has."""
    ports: str = ""
    """Name of the BPF program for the ports that it may bind; empty: it has a private network."""


def leftovers(
    recorded: Collection[str],
    unreadable: Collection[str],
    units: Collection[str],
    roots: Collection[str],
) -> list[str]:
    """Return the ids of units and roots that belong to no task and are removed (promise P9).

    `recorded` are the ids of known tasks. `unreadable` are ids whose record could not be read:
    their tasks continue to run until an owner puts or deletes them (F-06).
    """
    on_host = {task_of(unit) for unit in units} | set(roots)
    return sorted(on_host - set(recorded) - set(unreadable))


def rebuilt(
    copies: Mapping[str, TaskRecord], keys: Mapping[str, str], unreadable: Collection[str]
) -> dict[str, TaskRecord]:
    """Return the copies that replace missing and unreadable records (F-06).

    `copies` are the copies of the records in memory. `keys` maps the task of each existing unit to
    the key of the specification from which it was started. A copy that differs from the running
    unit is not used: that task continues to run until an owner sends a request. A task that was
    being removed is still removed. For a missing record, which is not `unreadable`, only a running
    unit proves that it existed.
    """
    return {
        task_id: record
        for task_id, record in copies.items()
        if keys.get(task_id) == key_of(record.spec)
        or (task_id in unreadable and (record.wanted is Wanted.GONE or task_id not in keys))
    }
