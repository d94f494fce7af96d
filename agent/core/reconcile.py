"""What is on the host against what is recorded, at the start of the agent."""

from __future__ import annotations

from collections.abc import Collection

from agent.core.records import task_of


def leftovers(
    recorded: Collection[str],
    spared: Collection[str],
    units: Collection[str],
    roots: Collection[str],
) -> list[str]:
    """Return the ids of what belongs to no task, to be removed (promise P9: no orphans).

    `recorded` are the ids of known tasks. `spared` are ids whose record could not be read:
    their tasks run on untouched until an owner speaks up (F-06).
    """
    found = {task_of(unit) for unit in units} | set(roots)
    return sorted(found - set(recorded) - set(spared))
