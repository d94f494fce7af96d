"""Derives the commands to agents from a job's record and the observed machines."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.agents.core.commands import Command, Start, Stop
from control_plane.agents.core.observed import ObservedMachine, View
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord, spec_of, task_at, task_id
from control_plane.scheduler.core.copies import staying

_COMMANDED = (TaskPhase.STARTING, TaskPhase.STOPPING)
"""Phases in which an agent may need a command."""


def commands(record: JobRecord, view: View) -> list[Command]:
    """Return the commands to agents that the record needs, without those already confirmed."""
    still_there = staying(record.leaving, view)
    found: list[Command | None] = [
        _command_of(record, task, view, still_there)
        for task in record.tasks
        if task.phase in _COMMANDED
    ]
    for name, ids in record.leaving.items():
        found += [_stop_of_left_behind(record, gone, name, view) for gone in ids]
    return [command for command in found if command is not None]


def command_about(record: JobRecord, index: int, machine: str, view: View) -> Command | None:
    """Return the command of `commands` about a task on a machine, if there is one.

    `view` has that machine, and those that the task is leaving.
    """
    gone = task_id(record.name, index)
    if gone in record.leaving.get(machine, ()):
        return _stop_of_left_behind(record, gone, machine, view)
    task = task_at(record, index)
    if task is None or task.placement is None or task.placement.machine != machine:
        return None
    return _command_of(record, task, view, staying(record.leaving, view))


def _command_of(
    record: JobRecord, task: TaskRecord, view: View, still_there: Mapping[str, str]
) -> Command | None:
    if task.placement is None:
        return None
    machine = view.get(task.placement.machine)
    if machine is None or not (machine.up and machine.answering):
        return None
    name = task_id(record.name, task.index)
    status = machine.tasks.get(name)
    is_held = machine.held_by(spec_of(record, task).entitlement)
    if task.phase is TaskPhase.STARTING and machine.ready and is_held:
        if name not in still_there and (status is None or status.generation < task.generation):
            place, version = task.placement, task.version
            return Start(place.machine, name, task.index, version, task.generation, place)
    elif task.phase is TaskPhase.STOPPING and not _has_confirmed_stop(
        machine, name, task.generation
    ):
        return Stop(task.placement.machine, name, task.generation)
    return None


def _stop_of_left_behind(record: JobRecord, gone: str, name: str, view: View) -> Stop | None:
    machine = view.get(name)
    if machine is None or not (machine.up and machine.answering) or gone not in machine.tasks:
        return None
    if _has_confirmed_stop(machine, gone, machine.tasks[gone].generation):
        return None
    return Stop(name, gone, record.generation, urgent=True)


def _has_confirmed_stop(machine: ObservedMachine, name: str, generation: int) -> bool:
    """Return whether the agent confirmed a stop of this generation and still has the task."""
    return name in machine.tasks and machine.stopped.get(name, 0) >= generation
