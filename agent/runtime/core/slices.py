"""Names of the slices that tasks run in, and of each task's cgroup."""

from __future__ import annotations

from agent.api import TaskSpec
from agent.runtime.core.records import has_huge_pages, unit_of

TASKS_SLICE = "/workload.slice"
"""The cgroup of all tasks, below the root of the hierarchy (systemd.slice(5))."""


def slice_of(entitlement: str) -> str:
    r"""Return the slice of an entitlement; a dash would start a sub-slice, so it becomes `\x2d`."""
    return "workload-" + entitlement.replace("-", r"\x2d") + ".slice"


def slice_for(spec: TaskSpec) -> str:
    """Return the slice that a task runs in.

    Tasks with their own CPUs or huge pages run in sibling slices. The slice of the other tasks does
    not allow these CPUs and pages. The name of an entitlement never contains `_`.
    """
    own = "_own" if spec.resources.exclusive_cpus else ""
    huge = "_huge" if has_huge_pages(spec) else ""
    return slice_of(spec.entitlement).replace(".slice", f"{own}{huge}.slice")


def _suffixes(name: str) -> list[str]:
    return name.removesuffix(".slice").split("_")[1:]


def _is_task_slice(name: str) -> bool:
    return name.startswith("workload-") and name.endswith(".slice")


def is_shared_slice(name: str) -> bool:
    """Return whether the tasks of a cgroup below `workload.slice` share CPUs."""
    return _is_task_slice(name) and "own" not in _suffixes(name)


def is_without_pages(name: str) -> bool:
    """Return whether the tasks of a cgroup below `workload.slice` have no huge pages."""
    return _is_task_slice(name) and "huge" not in _suffixes(name)


def cgroup_of(task_id: str, spec: TaskSpec) -> str:
    """Return the cgroup of a task, below the root of the hierarchy."""
    return f"{TASKS_SLICE}/{slice_for(spec)}/{unit_of(task_id)}"
