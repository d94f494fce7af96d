"""A new generation that has to prove itself, and the way back to the one before.

The old specification is kept in the task's record until the new one was healthy, so whether
to go back is decided from what is on disk, by whichever agent looks.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import Health, TaskState
from agent.core.lease import Moment
from agent.core.records import TaskRecord, key_of

_AT_REST = (TaskState.BACKOFF, TaskState.STOPPED, TaskState.FAILED)


def with_gate(new: TaskRecord, before: TaskRecord, boot_s: float) -> TaskRecord:
    """Return the record of a new generation with the gate that it has to pass, if any.

    What would be gone back to is what was healthy: the specification before, or the one that
    was already kept because that one had not passed its own gate yet.
    """
    new = replace(new, gone_back="")
    gate_s = new.spec.life.health_gate_s
    good = before.previous or before.spec
    served = before.state is TaskState.RUNNING and before.health is Health.HEALTHY
    if gate_s is None or not (served or before.previous) or key_of(good) == key_of(new.spec):
        return replace(new, previous=None, gate_boot_s=None)
    return replace(new, previous=good, gate_boot_s=boot_s + gate_s)


def passed_gate(task: TaskRecord) -> TaskRecord:
    """Return the task without its way back, once it is healthy."""
    if task.state is TaskState.RUNNING and task.health is Health.HEALTHY and task.previous:
        return replace(task, previous=None, gate_boot_s=None)
    return task


def after_gate(task: TaskRecord, now: Moment, boot_id: str) -> TaskRecord:
    """Return the task, back behind its gate, or as it is."""
    task = passed_gate(task)
    old, until = task.previous, task.gate_boot_s
    if old is None or until is None:
        return task
    if task.boot_id != boot_id:  # seconds of another boot say nothing
        return replace(task, previous=None, gate_boot_s=None)
    if task.state in _AT_REST:
        why = task.reason or "it ended"
    elif now.boot_s >= until:
        why = task.reason or "it did not get healthy in time"
    else:
        return task
    back = replace(
        task,
        spec=replace(old, epoch=task.spec.epoch),
        previous=None,
        gate_boot_s=None,
        gone_back=f"generation {task.spec.generation} did not pass its health gate ({why}); "
        f"generation {old.generation} was brought back",
        streak=0,
        health=Health.UNKNOWN,
        next_start_at=None,
        next_start_boot_s=None,
    )
    state = TaskState.ACCEPTED if task.state in _AT_REST else TaskState.STOPPING
    return replace(back, state=state, reason="")
