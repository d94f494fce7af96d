"""Explains on which machine the volumes of a task are, and their future (docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agent.api.volumes import VolumeKind
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, spec_of, task_id
from control_plane.api.operations import OperationKind

FindJob = Callable[[str], JobRecord | None]


def volume_notes(record: JobRecord, find: FindJob) -> list[str]:
    """Describe where the volumes of a job's tasks are: first in general, then task by task.

    Empty for a job without persistent or shared volumes.
    """
    specs = (record.spec, *record.specs.values())
    kinds = {volume.kind for spec in specs for volume in spec.volumes.values()}
    if not kinds & {VolumeKind.PERSISTENT, VolumeKind.SHARED}:
        return []
    kept = sorted({name for task in record.tasks for name in _persistent(record, task)})
    found = []
    if kept:
        found.append(
            f"volumes {', '.join(kept)} stay on the machine of their task: updates, restarts and "
            "the spread leave it there; if the machine fails or is emptied, the task "
            "starts elsewhere with empty volumes, and their content is left behind"
        )
    for task in record.tasks:
        found += _of_task(record, task)
        found += _shared(record, task, find)
    for machine, tasks in sorted(record.leaving.items()):
        if kept:
            found.append(
                f"{machine} has volumes of {', '.join(sorted(tasks))} from before the move"
            )
    return found


def _persistent(record: JobRecord, task: TaskRecord) -> list[str]:
    volumes = spec_of(record, task).volumes
    return sorted(n for n, volume in volumes.items() if volume.kind is VolumeKind.PERSISTENT)


def _of_task(record: JobRecord, task: TaskRecord) -> Iterator[str]:
    kept = ", ".join(_persistent(record, task))
    if not kept or task.placement is None:
        return
    machine, what = task.placement.machine, f"task {task.index}: {kept}"
    operation = task.operation
    moves = operation is not None and operation.kind is OperationKind.MOVE and not operation.instead
    is_here = operation is not None and operation.to_machine == machine  # it moved already
    has_controller = record.spec.controller is not None and not record.stopping
    held_back = "; it stays until its controller acknowledges the move" if has_controller else ""
    if task.phase is TaskPhase.LOST:
        yield (
            f"{what} on {machine}, which is gone: the task continues with it if {machine} is "
            "back before another machine is found, where it would start empty"
        )
    elif operation is not None and moves and not is_here:
        yield (
            f"{what} on {machine}, which it has to leave because of {operation.cause}: it will "
            f"start empty elsewhere{held_back}"
        )
    else:
        yield f"{what} on {machine}"


def _shared(record: JobRecord, task: TaskRecord, find: FindJob) -> Iterator[str]:
    """Describe where the shared volumes of other tasks are that a task reads."""
    if task.placement is None:
        return
    machine = task.placement.machine
    for name, volume in sorted(spec_of(record, task).volumes.items()):
        if volume.kind is not VolumeKind.SHARED:
            continue
        owner, _, source_volume = volume.source.partition(".")
        source_machine = _machine_of(owner, find)
        what = f"task {task.index}: {name} is {source_volume} of {owner}"
        if source_machine == machine:
            yield f"{what}, on {machine}, too"
        elif source_machine:
            yield (
                f"{what}, which is on {source_machine}: on {machine} the task waits unless one was"
                " left there"
            )
        else:
            yield f"{what}, which is on no machine: on {machine} the task waits unless one was left"


def _machine_of(owner: str, find: FindJob) -> str:
    job, _, index = owner.rpartition("-")
    record = find(job)
    for task in record.tasks if record is not None else ():
        if task_id(job, task.index) == f"{job}-{index}" and task.placement is not None:
            return task.placement.machine
    return ""
