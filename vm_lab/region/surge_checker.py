"""The rule about extra tasks of a simulated region: never more than the job's owner allows.

It reads the stored tasks, and decodes the few fields it needs. A task that is removed because of a
smaller size does not count, as in Kubernetes: it is drained first, and its agent may not answer. An
extra task that is removed counts until its agent has been asked to stop it (SC21).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from control_plane.store.protocol import Operation, Put
from vm_lab.region.machine import Copy

if TYPE_CHECKING:
    from vm_lab.region.clients import OwnedJob

TASKS = "tasks/"
REMOVAL = "remove"


class _Operation(msgspec.Struct, frozen=True):
    """The fields read of a stored operation."""

    kind: str


class _Task(msgspec.Struct, frozen=True):
    """The fields read of a stored task."""

    index: int
    extra: bool = False
    operation: _Operation | None = None


class _Chunk(msgspec.Struct, frozen=True):
    """The fields read of a stored chunk of a job's tasks."""

    tasks: list[_Task] = []


@dataclass(slots=True)
class SurgeChecker:
    """Counts the tasks of a job that are not being removed."""

    _removed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Stored key → its tasks that are being removed and are not extra."""

    def stored(self, operations: Sequence[Operation]) -> None:
        """Read the tasks that were stored."""
        for operation in operations:
            if not isinstance(operation, Put) or not operation.key.startswith(TASKS):
                continue
            job = operation.key.split("/")[1]
            chunk = msgspec.json.decode(operation.value, type=_Chunk)
            self._removed[operation.key] = frozenset(
                f"{job}-{task.index}"
                for task in chunk.tasks
                if task.operation is not None and task.operation.kind == REMOVAL and not task.extra
            )

    def excess(
        self, job: str, owned: OwnedJob | None, copies: Mapping[str, dict[str, Copy]]
    ) -> str:
        """Return an error text if too many tasks of a job run, else an empty text."""
        if owned is None or owned.requested is None or not owned.requested.update.surge:
            return ""
        keys = [key for key in self._removed if key.startswith(f"{TASKS}{job}/")]
        removed = frozenset[str]().union(*(self._removed[key] for key in keys))
        most = owned.largest_size + owned.requested.update.surge
        alive = [
            task
            for task, task_copies in copies.items()
            if task.startswith(f"{job}-")
            and task not in removed
            and any(copy.wanted for copy in task_copies.values())
        ]
        return f"{job} has {len(alive)} tasks, at most {most} may be" if len(alive) > most else ""
