"""What changed between two records of a job, for components that follow all jobs."""

from __future__ import annotations

from control_plane.api.jobs import JobRecord, TaskRecord


def has_same_tasks_and_specs(before: JobRecord | None, after: JobRecord | None) -> bool:
    """Return whether two records of a job differ at most by a write of intents.

    Tasks and specifications are the same objects; an autoscaler writes most sizes to confirm them.
    """
    return (
        before is not None
        and after is not None
        and before.tasks is after.tasks
        and before.leaving is after.leaving
        and before.spec is after.spec
        and before.specs is after.specs
        and before.rollout is after.rollout
    )


TaskChange = tuple[TaskRecord | None, TaskRecord | None]
"""A task before the change (None: it is new) and after it (None: it is gone)."""


def task_changes(before: JobRecord | None, after: JobRecord | None) -> list[TaskChange]:
    """Return the tasks that are not the same objects in two records of a job.

    Most rounds of a job change few of its tasks, and followers of jobs look only at those.
    """
    old = before.tasks if before is not None else []
    new = after.tasks if after is not None else []
    if old is new:
        return []
    if len(old) == len(new):  # almost always with the same indexes
        pairs = [(was, task) for was, task in zip(old, new, strict=True) if was is not task]
        if all(was.index == task.index for was, task in pairs):
            return list[TaskChange](pairs)
    known = {task.index: task for task in old}
    found: list[TaskChange] = [
        (was, task) for task in new if (was := known.pop(task.index, None)) is not task
    ]
    found += [(gone, None) for gone in known.values()]
    return found
