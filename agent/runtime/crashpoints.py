"""Named points between the agent's steps, at which a test can end the process.

A point does nothing unless it is armed by `TWINE_CRASHPOINT=name`, which the agent reads only if
its configuration has `crash_points = true`. At an armed point the process ends as if it was killed,
without cleanup and without an answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from wire.errors import ConfigError

_TASK_STEPS = ("prepare", "start", "stop", "remove-root", "forget")
"""Steps of a task (`tasks.core.lifecycle.Action`), each with a point before it and one after it."""
POINTS = (
    "task.recorded",
    *(f"{step}.{moment}" for step in _TASK_STEPS for moment in ("decided", "done")),
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
"""All points; a test ends the agent at each one."""
KILLED = 137
"""Exit status as after SIGKILL."""


def _end() -> None:
    os._exit(KILLED)


class _Armed:
    """The armed point of this process, at most one."""

    def __init__(self) -> None:
        self.name = ""
        self.die: Callable[[], None] = _end


_armed = _Armed()


def arm(name: str, die: Callable[[], None] = _end) -> None:
    """Arm this point: `crash_point` calls `die` there. An empty name disarms."""
    if name and name not in POINTS:
        raise ConfigError(f"there is no crash point {name!r}", hint=", ".join(POINTS))
    _armed.name, _armed.die = name, die


def arm_from_environment(allowed: bool) -> None:
    """Arm the point that the environment names, if `allowed` by the configuration."""
    if allowed and (name := os.environ.get("TWINE_CRASHPOINT", "")):
        arm(name)


def crash_point(name: str) -> None:
    """End the process if this point is armed."""
    if _armed.name == name:
        _armed.die()
