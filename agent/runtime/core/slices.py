"""The slices that tasks run in, and the cgroup of each task: names alone."""

from __future__ import annotations

from agent.api import TaskSpec
from agent.runtime.core.records import unit_of

TASKS_SLICE = "/workload.slice"
"""The cgroup of all tasks, below the root of the hierarchy (systemd.slice(5))."""


def has_huge_pages(spec: TaskSpec) -> bool:
    """Return whether a task has huge pages of its own."""
    more = spec.resources  # asked of every task with each start
    return more.hugepages_2mib > 0 or more.hugepages_1gib > 0


def slice_of(entitlement: str) -> str:
    r"""Return the slice of an entitlement; a dash would be a level of its own, so `\x2d`."""
    return "workload-" + entitlement.replace("-", r"\x2d") + ".slice"


def slice_for(spec: TaskSpec) -> str:
    """Return the slice that a task runs in.

    Tasks with CPUs or huge pages of their own have sibling slices; the slice of the other tasks
    keeps those off these CPUs and pages. No entitlement's name has a `_`.
    """
    own = "_own" if spec.resources.exclusive_cpus else ""
    huge = "_huge" if has_huge_pages(spec) else ""
    return slice_of(spec.entitlement).replace(".slice", f"{own}{huge}.slice")


def _marks(name: str) -> list[str]:
    return name.removesuffix(".slice").split("_")[1:]


def _is_of_tasks(name: str) -> bool:
    return name.startswith("workload-") and name.endswith(".slice")


def is_shared_slice(name: str) -> bool:
    """Return whether a cgroup below `workload.slice` is of tasks that share CPUs."""
    return _is_of_tasks(name) and "own" not in _marks(name)


def is_without_pages(name: str) -> bool:
    """Return whether a cgroup below `workload.slice` is of tasks without huge pages."""
    return _is_of_tasks(name) and "huge" not in _marks(name)


def cgroup_of(task_id: str, spec: TaskSpec) -> str:
    """Return the cgroup of a task, below the root of the hierarchy."""
    return f"{TASKS_SLICE}/{slice_for(spec)}/{unit_of(task_id)}"
