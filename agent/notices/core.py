"""The text of a task's notices, and when its hook is called again. Pure."""

from __future__ import annotations

import msgspec

from agent.api import TaskSpec
from agent.api.notices import HostNotices

INSIDE = "/run/twine-notice"
"""Folder inside the task with the notices; it is in memory (tmpfs)."""
FILE = "notice.json"
RETRY_S, RETRY_MAX_S = 1.0, 30.0
"""Pause after the first failed call of a hook; it doubles with each further failure."""
NO_NOTICES = b'{"notices":[],"capacity":[]}'


def text_for(spec: TaskSpec, held: HostNotices) -> bytes:
    """Return a task's notices as JSON, with the capacity of the entitlements that it named."""
    request = spec.life.notice
    asked = set(request.capacity_of) if request is not None else set()
    capacity = [state for state in held.capacity if state.entitlement in asked]
    return msgspec.json.encode({"notices": held.notices, "capacity": capacity})


def pause_s(failures: int) -> float:
    """Return how long to wait after a number of failed calls."""
    return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failures - 1, 10))


def notice_binds(task_id: str, spec: TaskSpec, folder: str) -> list[str]:
    """Return the bind mounts with which a task sees its notices in `folder`/TASK.

    The folder is mounted, not the file: a file that is renamed into it later is visible at once.
    """
    if spec.life.notice is None:
        return []
    return [f"{folder}/{task_id}:{INSIDE}"]
