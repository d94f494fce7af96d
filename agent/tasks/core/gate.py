"""The health gate: a new generation has to become healthy, or the previous one is restored.

The record of the task keeps the old specification until the new one was healthy. So a restarted
agent can also decide from the disk whether to restore it.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import Health, TaskSpec, TaskState
from agent.lease.core.lease import LeaseMoment
from agent.runtime.core.records import AT_REST, TaskRecord, key_of


def with_gate(new: TaskRecord, before: TaskRecord) -> TaskRecord:
    """Return the record of a new generation, with the gate that it has to pass if it has one.

    The time of the gate begins once the old version has ended completely (`with_gate_begun`).

    The specification to restore is the last healthy one. If the previous specification has not
    passed its own gate, that is the one that the record already keeps.
    """
    new = replace(new, gone_back="")
    gate_s = new.spec.life.health_gate_s
    healthy_spec = before.previous or before.spec
    was_healthy = before.state is TaskState.RUNNING and before.health is Health.HEALTHY
    if (
        gate_s is None
        or not (was_healthy or before.previous)
        or key_of(healthy_spec) == key_of(new.spec)
    ):
        return replace(new, previous=None, gate_boot_s=None)
    return replace(new, previous=healthy_spec, gate_boot_s=None)


def with_gate_begun(task: TaskRecord, now: LeaseMoment) -> TaskRecord:
    """Return a task whose old version has ended completely, with the end of its gate set.

    The time that the old version took to end, hook included, does not count.
    """
    gate_s = task.spec.life.health_gate_s
    if task.previous is None or task.gate_boot_s is not None or gate_s is None:
        return task
    return replace(task, gate_boot_s=now.boot_s + gate_s)


def has_health_probe(spec: TaskSpec) -> bool:
    """Return whether a probe decides the health of a task; else running counts as healthy."""
    return spec.probe is not None or spec.life.startup is not None


def without_passed_gate(task: TaskRecord, now: LeaseMoment) -> TaskRecord:
    """Return the task without its previous specification, once it has passed its gate.

    A task with a probe passes when it is healthy. A task without a probe counts as healthy from its
    start, so it passes by running for the whole time of the gate.
    """
    healthy = task.state is TaskState.RUNNING and task.health is Health.HEALTHY
    if healthy and (is_gate_over(task, now) or (task.previous and has_health_probe(task.spec))):
        return replace(task, previous=None, gate_boot_s=None)
    return task


def after_gate(task: TaskRecord, boot_id: str) -> TaskRecord:
    """Return the task; if it ended during its gate, with its previous specification restored."""
    if task.previous is None:
        return task
    if task.boot_id != boot_id:  # seconds since another boot cannot be compared
        return replace(task, previous=None, gate_boot_s=None)
    begun = task.gate_boot_s is not None
    return rolled_back(task, "it ended") if begun and task.state in AT_REST else task


def is_gate_over(task: TaskRecord, now: LeaseMoment) -> bool:
    """Return whether the time of the task's gate is over."""
    ends_s = task.gate_boot_s
    return task.previous is not None and ends_s is not None and now.boot_s >= ends_s


def rolled_back(task: TaskRecord, why: str) -> TaskRecord:
    """Return the task with its previous, healthy specification.

    `why` is the cause to report if the task has no reason of its own.
    """
    old = task.previous
    assert old is not None
    back = replace(
        task,
        spec=replace(old, epoch=task.spec.epoch),
        previous=None,
        gate_boot_s=None,
        gone_back=f"generation {task.spec.generation} did not pass its health gate "
        f"({task.reason or why}); generation {old.generation} was restored",
        streak=0,
        health=Health.UNKNOWN,
        next_start_at=None,
        next_start_boot_s=None,
    )
    state = TaskState.ACCEPTED if task.state in AT_REST else TaskState.STOPPING
    return replace(back, state=state, reason="")
