"""The commands to agents about tasks, and the running tasks that no record contains."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from agent.api import TaskStatus
from control_plane.agents.core.restored import predates_restore
from control_plane.api.jobs import Placement


@dataclass(frozen=True, slots=True)
class Start:
    """Put a task on its machine."""

    machine: str
    task: str
    index: int
    version: int
    generation: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Stop:
    """Delete a task from a machine."""

    machine: str
    task: str
    generation: int
    urgent: bool = field(default=False, compare=False)
    """It must not run there at all (a second copy, a job that is gone), so it is stopped first."""


Command = Start | Stop


def unknown_tasks(
    tasks: Mapping[str, TaskStatus],
    known: Set[str],
    restored: int = 0,
    released: Set[str] = frozenset(),
) -> list[str]:
    """Return the tasks on a machine that a control plane started and that no record places there.

    `known` are the tasks that belong there, or that their job is already removing. Tasks that a
    local operator started (no epoch, no job) are not included. Neither are tasks of the term
    `restored` or before, unless an operator released them (`released`). The store was restored in
    that term from a copy, which may lack them (docs/adr/0111).
    """
    return [
        name
        for name, status in tasks.items()
        if status.epoch
        and status.job
        and name not in known
        and (name in released or not predates_restore(status, restored))
    ]
