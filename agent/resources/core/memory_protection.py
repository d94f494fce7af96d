"""Computes the memory protection of slices from the promises to their tasks.

Pure. In a cgroup the kernel protects at most as much as each of its parents does (Linux,
Documentation/admin-guide/cgroup-v2.rst, memory.min). systemd sets no protection of slices. A slice
must not protect more than the sum: tasks without a promise would share the rest
(`memory_recursiveprot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.api import TaskSpec
from agent.resources.core.limits import pages
from agent.runtime.core.slices import TASKS_SLICE, slice_for

PROTECTION_FILES = {"MemoryMin": "memory.min", "MemoryLow": "memory.low"}
"""Property of a slice → the kernel's file."""


def protection_of_slices(specs: Iterable[TaskSpec]) -> dict[str, dict[str, int]]:
    """Return the properties of each slice that contains a task with protected memory."""
    slices: dict[str, dict[str, int]] = {}
    for spec in specs:
        more = spec.resources
        if not (more.memory_min_bytes or more.memory_low_bytes):
            continue
        promised = {"MemoryMin": more.memory_min_bytes, "MemoryLow": more.memory_low_bytes}
        for name in (TASKS_SLICE.removeprefix("/"), slice_for(spec)):
            protection = slices.setdefault(name, dict.fromkeys(PROTECTION_FILES, 0))
            for key, size in promised.items():
                protection[key] += size
    return slices


def files(protection: Mapping[str, int], page_bytes: int) -> dict[str, str]:
    """Return the values of the kernel's files for these properties."""
    return {name: pages(protection[key], page_bytes) for key, name in PROTECTION_FILES.items()}


def is_protecting(values: Mapping[str, str]) -> bool:
    """Return whether the values of a slice's files protect any memory."""
    return any(value != "0" for value in values.values())
