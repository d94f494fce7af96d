"""Named points between the steps of what the agent does, at which tests make it die.

A point does nothing unless it is armed. It is armed by `TWINE_CRASHPOINT=name`, which is read
only where the configuration has `crash_points = true`; the agent then ends at that point like
one that was killed: no cleaning up, no answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from wire.errors import ConfigError

POINTS = (
    "task.recorded",
    "prepare.decided",
    "prepare.done",
    "start.decided",
    "start.done",
    "stop.decided",
    "stop.done",
    "remove-root.decided",
    "remove-root.done",
    "forget.decided",
    "forget.done",
    "image.stored",
    "image.unpacked",
    "image.synced",
    "image.moved",
    "image.declared",
    "pull.resolved",
    "pull.fetched",
    "pull.layer-begun",
    "pull.layer-applied",
    "pull.layer-moved",
    "pull.layer-published",
    "pull.assembled",
    "delete.undeclared",
    "delete.removed",
    "volume.made",
    "volume.limited",
    "volume.snapshot-made",
    "volume.removed",
    "scratch.removed",
    "gc.image-deleted",
    "gc.layer-undeclared",
    "gc.layer-deleted",
)
"""Every point there is; a test dies at each one. Those of a task's steps are named by
`tasks.core.lifecycle.Action`."""
KILLED = 137
"""Exit status as after SIGKILL."""


def _end() -> None:
    os._exit(KILLED)


class _Armed:
    """What is armed in this process: one point at most."""

    def __init__(self) -> None:
        self.name = ""
        self.die: Callable[[], None] = _end


_armed = _Armed()


def arm(name: str, die: Callable[[], None] = _end) -> None:
    """Die at this point from now on; an empty name disarms."""
    if name and name not in POINTS:
        raise ConfigError(f"there is no crash point {name!r}", hint=", ".join(POINTS))
    _armed.name, _armed.die = name, die


def arm_from_environment(allowed: bool) -> None:
    """Arm the point that the environment names, where the configuration allows it."""
    if allowed and (name := os.environ.get("TWINE_CRASHPOINT", "")):
        arm(name)


def passed(name: str) -> None:
    """End the process if this point is armed; else return."""
    if _armed.name == name:
        _armed.die()
