"""Memory protection: what slices must keep, so that their tasks keep what they were promised.

Pure. A protection counts in a cgroup only as far as all those above it have one (Linux,
Documentation/admin-guide/cgroup-v2.rst, memory.min), and systemd gives slices none by itself. More
than the sum would be shared out among tasks without a promise (`memory_recursiveprot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.api import TaskSpec
from agent.resources.core.limits import pages
from agent.runtime.core.slices import TASKS_SLICE, slice_for

KEPT_FILES = {"MemoryMin": "memory.min", "MemoryLow": "memory.low"}
"""Property of a slice, and the kernel's file."""


def kept_in_slices(specs: Iterable[TaskSpec]) -> dict[str, dict[str, int]]:
    """Return the properties of each slice below which a task was promised memory."""
    found: dict[str, dict[str, int]] = {}
    for spec in specs:
        more = spec.resources
        if not (more.memory_min_bytes or more.memory_low_bytes):
            continue
        promised = {"MemoryMin": more.memory_min_bytes, "MemoryLow": more.memory_low_bytes}
        for name in (TASKS_SLICE.removeprefix("/"), slice_for(spec)):
            kept = found.setdefault(name, dict.fromkeys(KEPT_FILES, 0))
            for key, size in promised.items():
                kept[key] += size
    return found


def files(kept: Mapping[str, int]) -> dict[str, str]:
    """Return what the kernel's files of such a slice say."""
    return {name: pages(kept[key]) for key, name in KEPT_FILES.items()}


def is_kept(values: Mapping[str, str]) -> bool:
    """Return whether files of a slice say that it keeps something."""
    return any(value != "0" for value in values.values())
