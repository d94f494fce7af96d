"""Computes the progress of a run on a job from the job's status."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from agent.api import Health, TaskState
from control_plane.api.intents import Dimension, PushIntent, StoredIntent
from control_plane.api.jobs import JobRecord, JobStatus, TaskPhase, TaskRecord, spec_of, task_id
from conveyor.runs import JobProgress

_UNHEALTHY_STATES = (TaskState.BACKOFF, TaskState.FAILED)


def progress(status: JobStatus, image: str) -> JobProgress:
    """Return the progress of a job with an image.

    Tasks of a canary intent belong to the writer of that intent: they count neither as new nor as
    stable. Extra tasks of an update do not count either.
    """
    record, rollout = status.record, status.record.rollout
    if record.stopping:
        return JobProgress(job=record.name)
    tasks = [task for task in record.tasks if not _is_extra(record, task)]
    new = [task for task in tasks if spec_of(record, task).image == image]
    stable = [task for task in tasks if spec_of(record, task).image != image]
    intent = record.intents.get(Dimension.PUSH, StoredIntent())
    is_current = rollout is not None and rollout.version == record.version
    updating = (is_current and rollout is not None and not rollout.done) or any(
        task.version != record.version and task.phase is not TaskPhase.LOST for task in tasks
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
        push=_push(record, intent),
        push_version=intent.version,
        push_reason=intent.reason,
        owner=intent.writer if intent.is_owned and intent.value is not None else "",
        went_back=rollout.reason if is_current and rollout and rollout.returns_from else "",
        held=_held(record),
        new_tasks=_ids(record, new),
        stable_tasks=_ids(record, stable),
    )


def _push(record: JobRecord, intent: StoredIntent) -> PushIntent:
    if intent.value is None:
        return PushIntent(version=record.version)
    return msgspec.convert(intent.value, PushIntent)


def _held(record: JobRecord) -> str:
    hold = record.intents.get(Dimension.HOLD)
    if hold is None or hold.value is None or hold.expires_at is None:
        return ""
    until = datetime.fromtimestamp(hold.expires_at, UTC)
    why = f": {hold.reason}" if hold.reason else ""
    return f"{hold.writer} holds it until {until:%Y-%m-%d %H:%M:%S} UTC{why}"


def _is_extra(record: JobRecord, task: TaskRecord) -> bool:
    return task.extra or task.version in record.trials


def _is_healthy(task: TaskRecord) -> bool:
    return task.listed and task.health is Health.HEALTHY and task.state is TaskState.RUNNING


def _is_unhealthy(task: TaskRecord) -> bool:
    return task.health is Health.UNHEALTHY or task.state in _UNHEALTHY_STATES


def _ids(record: JobRecord, tasks: list[TaskRecord]) -> tuple[str, ...]:
    return tuple(task_id(record.name, task.index) for task in tasks)
