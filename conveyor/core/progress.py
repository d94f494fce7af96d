"""What a job's status says about a run."""

from __future__ import annotations

from agent.api import Health, TaskState
from control_plane.api.jobs import JobRecord, JobStatus, TaskPhase, TaskRecord, spec_of, task_id
from conveyor.runs import JobProgress

_TROUBLE = (TaskState.BACKOFF, TaskState.FAILED)


def progress(status: JobStatus, image: str) -> JobProgress:
    """Return how far a job is with an image."""
    record, rollout = status.record, status.record.rollout
    if record.stopping:
        return JobProgress(job=record.name)
    new = [task for task in record.tasks if spec_of(record, task).image == image]
    stable = [task for task in record.tasks if spec_of(record, task).image != image]
    is_current = rollout is not None and rollout.version == record.version
    updating = (is_current and rollout is not None and not rollout.done) or any(
        task.version != record.version and task.phase is not TaskPhase.LOST for task in record.tasks
    )
    missing = status.wanted - status.healthy
    serves = status.healthy > 0 or status.wanted == 0
    halted = rollout.reason if is_current and rollout is not None and rollout.halted else ""
    return JobProgress(
        job=record.name,
        image=record.spec.image,
        size=status.wanted,
        new=len(new),
        new_healthy=sum(_is_healthy(task) for task in new),
        new_unhealthy=sum(_is_unhealthy(task) for task in new),
        healthy=status.healthy,
        restarts=sum(task.restarts for task in new),
        updating=updating,
        settled=not updating and serves and missing <= record.spec.update.max_unavailable,
        halted=halted,
        frozen=record.paused,
        update=record.spec.update,
        new_tasks=_ids(record, new),
        stable_tasks=_ids(record, stable),
    )


def _is_healthy(task: TaskRecord) -> bool:
    return task.listed and task.health is Health.HEALTHY and task.state is TaskState.RUNNING


def _is_unhealthy(task: TaskRecord) -> bool:
    return task.health is Health.UNHEALTHY or task.state in _TROUBLE


def _ids(record: JobRecord, tasks: list[TaskRecord]) -> tuple[str, ...]:
    return tuple(task_id(record.name, task.index) for task in tasks)
