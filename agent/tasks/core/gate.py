"""A new generation that has to prove itself, and the way back to the one before.

The old specification is kept in the task's record until the new one was healthy, so whether
to go back is decided from what is on disk, by whichever agent looks.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import Health, TaskSpec, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import TaskRecord, key_of

_AT_REST = (TaskState.BACKOFF, TaskState.STOPPED, TaskState.FAILED)


def with_gate(new: TaskRecord, before: TaskRecord) -> TaskRecord:
    """Return the record of a new generation with the gate that it has to pass, if any.

    Its time begins once nothing of the version before it runs any more (`begun_gate`).

    What would be gone back to is what was healthy: the specification before, or the one that
    was already kept because that one had not passed its own gate yet.
    """
    new = replace(new, gone_back="")
    gate_s = new.spec.life.health_gate_s
    good = before.previous or before.spec
    served = before.state is TaskState.RUNNING and before.health is Health.HEALTHY
    if gate_s is None or not (served or before.previous) or key_of(good) == key_of(new.spec):
        return replace(new, previous=None, gate_boot_s=None)
    return replace(new, previous=good, gate_boot_s=None)


def begun_gate(task: TaskRecord, now: LeaseMoment) -> TaskRecord:
    """Return a task of whose old version nothing runs any more: now the time of its gate counts.

    The time that the old version took to end, hook included, does not count.
    """
    gate_s = task.spec.life.health_gate_s
    if task.previous is None or task.gate_boot_s is not None or gate_s is None:
        return task
    return replace(task, gate_boot_s=now.boot_s + gate_s)


def is_asked(spec: TaskSpec) -> bool:
    """Return whether a probe asks the task if it works; else it is only seen to run."""
    return spec.probe is not None or spec.life.startup is not None


def passed_gate(task: TaskRecord, now: LeaseMoment) -> TaskRecord:
    """Return the task without its way back, once it is healthy.

    One without a probe is as healthy right after its start as it ever gets: it passes by
    running for all of the gate's time.
    """
    healthy = task.state is TaskState.RUNNING and task.health is Health.HEALTHY
    over = task.gate_boot_s is not None and now.boot_s >= task.gate_boot_s
    if healthy and task.previous and (over or is_asked(task.spec)):
        return replace(task, previous=None, gate_boot_s=None)
    return task


def after_gate(task: TaskRecord, boot_id: str) -> TaskRecord:
    """Return the task, back behind its gate where it ended, or as it is."""
    if task.previous is None:
        return task
    if task.boot_id != boot_id:  # seconds of another boot say nothing
        return replace(task, previous=None, gate_boot_s=None)
    begun = task.gate_boot_s is not None
    return gone_back(task, "it ended") if begun and task.state in _AT_REST else task


def is_late(task: TaskRecord, now: LeaseMoment) -> bool:
    """Return whether the gate's time is over for a task that was just observed."""
    return (
        task.previous is not None
        and task.gate_boot_s is not None
        and (now.boot_s >= task.gate_boot_s)
    )


def gone_back(task: TaskRecord, why: str) -> TaskRecord:
    """Return the task with the specification that is known to work; `why`: if it has no reason."""
    old = task.previous
    assert old is not None
    back = replace(
        task,
        spec=replace(old, epoch=task.spec.epoch),
        previous=None,
        gate_boot_s=None,
        gone_back=f"generation {task.spec.generation} did not pass its health gate"
        f" ({task.reason or why}); generation {old.generation} was brought back",
        streak=0,
        health=Health.UNKNOWN,
        next_start_at=None,
        next_start_boot_s=None,
    )
    state = TaskState.ACCEPTED if task.state in _AT_REST else TaskState.STOPPING
    return replace(back, state=state, reason="")
