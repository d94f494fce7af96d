"""Which notices a task gets, as which text, and when its hook is called again. Pure."""

from __future__ import annotations

import msgspec

from agent.api import TaskSpec
from agent.api.notices import HostNotices

INSIDE = "/run/twine-notice"
"""Where a task finds them; on a file system that is in memory alone."""
FILE = "notice.json"
AGAIN_S, AGAIN_MAX_S = 1.0, 30.0
"""Pause after the first call of a hook that failed; it doubles with each one."""
NOTHING = b'{"notices":[],"capacity":[]}'


def text_for(spec: TaskSpec, held: HostNotices) -> bytes:
    """Return a task's notices as JSON, with the capacity that it asked about."""
    wish = spec.life.notice
    asked = set(wish.capacity_of) if wish is not None else set()
    capacity = [state for state in held.capacity if state.entitlement in asked]
    return msgspec.json.encode({"notices": held.notices, "capacity": capacity})


def pause_s(failures: int) -> float:
    """Return how long to wait after a number of failed calls."""
    return min(AGAIN_MAX_S, AGAIN_S * 2.0 ** min(failures - 1, 10))


def notice_binds(task_id: str, spec: TaskSpec, folder: str) -> list[str]:
    """Return what is mounted into a unit, so that its task sees the notices in `folder`/TASK.

    The folder is mounted, not the file: what is renamed into it later is seen at once.
    """
    if spec.life.notice is None:
        return []
    return [f"{folder}/{task_id}:{INSIDE}"]
