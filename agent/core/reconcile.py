"""What is on the host against what is recorded, at the start of the agent."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from agent.core.records import unit_of


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What nobody wants: units and roots without a record. Both are removed."""

    units: tuple[str, ...]
    roots: tuple[str, ...]


def leftovers(
    recorded: Collection[str],
    spared: Collection[str],
    units: Collection[str],
    roots: Collection[str],
) -> Leftovers:
    """Return what belongs to no task (promise P9: no orphans).

    `recorded` are the ids of known tasks. `spared` are ids whose record could not be read:
    their tasks run on untouched until an owner speaks up (F-06).
    """
    keep = set(recorded) | set(spared)
    keep_units = {unit_of(t) for t in keep}
    return Leftovers(
        units=tuple(sorted(set(units) - keep_units)), roots=tuple(sorted(set(roots) - keep))
    )
