"""Decides whether a request about a task is accepted: it is current, and the task fits."""

from __future__ import annotations

from msgspec.structs import replace

from agent.api import Health, TaskSpec, TaskState
from agent.runtime.core.records import (
    AT_REST,
    OVER,
    Instant,
    TaskRecord,
    Tombstone,
    Wanted,
    key_of,
)
from agent.tasks.core.lifecycle import CHANGED, LINGERS
from wire.units import about_size


def stale(generation: int, epoch: int, known: TaskRecord | Tombstone | None) -> str:
    """Return why a request is too old to be carried out, empty if it is not.

    A newer epoch (leadership term) wins with any generation. Within one epoch the higher generation
    wins (design contract 3.1). After a local user removed a task without a generation, only its own
    generation is refused. Generations of `twine-agent run` are times, and clocks are set back.
    """
    if known is None:
        return ""
    current = known.spec if isinstance(known, TaskRecord) else known
    if epoch < current.epoch:
        return f"epoch {epoch} is older than {current.epoch}, the term of the sender now in charge"
    if epoch > current.epoch:
        return ""
    unversioned = isinstance(known, Tombstone) and known.unversioned
    if generation < current.generation and not unversioned:
        return f"generation {generation} is older than {current.generation}, which is in force"
    if isinstance(known, Tombstone) and generation == known.generation:
        return f"generation {generation} was already removed"
    return ""


def contradiction(spec: TaskSpec, known: TaskRecord) -> str:
    """Return why a request for the present generation is refused, empty if it is not.

    A generation names one specification. A caller that sends another specification with the same
    number made a mistake. A success would hide that the task does not run that specification.
    """
    current = known.spec
    is_in_force = (spec.generation, spec.epoch) == (current.generation, current.epoch)
    if known.wanted is Wanted.GONE or not is_in_force:
        return ""
    fields = [
        f
        for f in TaskSpec.__struct_fields__
        if f != "image_trust" and getattr(spec, f) != getattr(current, f)
    ]
    if not fields:
        return ""
    return f"generation {spec.generation} is in force with another content ({', '.join(fields)})"


def tombstone_of(record: TaskRecord, now: Instant) -> Tombstone:
    """Return the tombstone of a removed task."""
    generation = 0 if record.orphan else record.spec.generation
    return Tombstone(
        task_id=record.task_id,
        generation=generation,
        epoch=record.spec.epoch,
        at=now.at,
        boot_id=now.boot_id,
        boot_s=now.boot_s,
        unversioned=record.unversioned,
    )


def accept(task_id: str, spec: TaskSpec, known: TaskRecord | None) -> TaskRecord | None:
    """Return the record for a new desired state, None if it changes nothing.

    If the task is being removed, its unit still ends and a new one is started.
    """
    if known is None:
        return TaskRecord(task_id=task_id, spec=spec)
    if known.wanted is Wanted.RUN and known.spec == spec:
        return None
    renewed = replace(known.spec, epoch=spec.epoch, image_trust=spec.image_trust)
    if known.wanted is Wanted.RUN and renewed == spec:
        return replace(known, spec=spec)
    changed = replace(known, spec=spec, wanted=Wanted.RUN, reason="", streak=0)
    if known.wanted is Wanted.GONE:
        changed = replace(changed, restart_asked=True, orphan=False, unversioned=False)
    if known.cut_off:
        changed = replace(changed, restart_asked=True, cut_off=False)
    if key_of(known.spec) != key_of(spec):
        changed = to_be_stopped(changed, CHANGED)
    if known.state in AT_REST:
        changed = replace(changed, state=TaskState.ACCEPTED, next_start_at=None)
        changed = replace(changed, next_start_boot_s=None)
    return changed


def to_be_stopped(task: TaskRecord, why: str) -> TaskRecord:
    """Return the task after its owner requested the end of its running unit.

    The state changes at once: it must not be mistaken for the state of the new generation.
    """
    if task.state is not TaskState.RUNNING:
        return task
    return replace(task, state=TaskState.STOPPING, health=Health.UNKNOWN, reason=why)


def is_over(task: TaskRecord) -> bool:
    """Return whether a task has ended and stays ended until it is put or restarted.

    Such a task uses no memory and no huge pages. So other tasks may use its share of both, and its
    restart has to be admitted again. Its volumes are on the disk until it is removed, so their
    limits still count. It also keeps its own CPUs, which are in its record.
    """
    ended = task.state in OVER and not task.restart_asked
    return ended and task.reason != LINGERS


def limits_refusal(spec: TaskSpec, memory_bytes: int, cpus: int, committed_bytes: int) -> str:
    """Return why the limits of a task exceed this machine, empty if they fit.

    This check is for local use; with a control plane the allocator has already made it.
    `committed_bytes` is the sum of the memory limits of the other tasks that are not over.
    """
    need = spec.limits.memory_max_bytes
    if committed_bytes + need > memory_bytes:
        return (
            f"memory_max_bytes {about_size(need)} does not fit: the machine has "
            f"{about_size(memory_bytes)} for tasks, and its other tasks may already use "
            f"{about_size(committed_bytes)}"
        )
    cores = spec.limits.cpu_max_cores
    if cores is not None and cores > cpus:
        return f"cpu_max_cores {cores:g} exceeds the {cpus} CPUs of the machine"
    return ""
