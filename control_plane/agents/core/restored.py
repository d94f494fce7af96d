"""Compares the tasks on machines with the records of a restored store."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from agent.api import TaskStatus
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, task_at
from control_plane.api.restored import Difference, FoundTask

_THERE = (TaskPhase.STARTING, TaskPhase.RUNNING, TaskPhase.DRAINING)


def predates_restore(status: TaskStatus, epoch: int) -> bool:
    """Return whether a task was started before the store was restored, so that it may lack it.

    `epoch` is the one in which the store was restored; 0: it never was.
    """
    return bool(status.job) and 0 < status.epoch <= epoch


def differences(
    machine: str,
    seen: Mapping[str, TaskStatus],
    wanted: Mapping[str, JobRecord | None],
    jobs: Container[str],
    epoch: int,
) -> Iterator[FoundTask]:
    """Yield what differs on one machine, by task.

    `wanted` maps the tasks that the store has there to their jobs. `jobs` are all stored jobs.
    """
    for name in sorted(seen.keys() | wanted.keys()):
        status, record = seen.get(name), wanted.get(name)
        if status is None:
            if record is not None and _is_placed_on(record, name, machine):
                yield FoundTask(
                    machine=machine,
                    task=name,
                    job=record.name,
                    entitlement=record.spec.entitlement,
                    difference=Difference.MISSING,
                )
        elif predates_restore(status, epoch):
            difference = _difference(status, record, jobs)
            if difference is not None:
                yield FoundTask(
                    machine=machine,
                    task=name,
                    job=status.job,
                    entitlement=status.entitlement,
                    difference=difference,
                    state=status.state,
                    generation=status.generation,
                    since=status.started_at,
                )


def _difference(
    status: TaskStatus, record: JobRecord | None, jobs: Container[str]
) -> Difference | None:
    if record is None:
        return Difference.NOT_PLACED if status.job in jobs else Difference.UNKNOWN_JOB
    task = _task(record, status.task_id)
    return Difference.CHANGED if task and status.generation > task.generation else None


def _is_placed_on(record: JobRecord, name: str, machine: str) -> bool:
    task = _task(record, name)
    if task is None or task.placement is None:
        return False
    return task.placement.machine == machine and task.phase in _THERE


def _task(record: JobRecord, name: str) -> TaskRecord | None:
    return task_at(record, int(name.rpartition("-")[2]))
