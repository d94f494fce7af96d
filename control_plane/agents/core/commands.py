"""The commands to agents about tasks, and the tasks of theirs that no record wants."""

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
    """It must not run there at all (a second copy, a job that is gone), so it goes first."""


Command = Start | Stop


def unknown_tasks(
    tasks: Mapping[str, TaskStatus],
    known: Set[str],
    restored: int = 0,
    released: Set[str] = frozenset(),
) -> list[str]:
    """Return those of a machine's tasks that are ours and that no record places there.

    `known` holds the ids that belong there, or that their job is already removing. Tasks that a
    local operator started (no epoch, no job) are left alone. So are tasks that were commanded in
    the term `restored` or before, unless an operator released them: the store was restored then
    from a copy, which may lack them (docs/adr/0111).
    """
    return [
        name
        for name, status in tasks.items()
        if status.epoch
        and status.job
        and name not in known
        and (name in released or not predates_restore(status, restored))
    ]
