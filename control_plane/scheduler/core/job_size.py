"""Which writer may set the size of a job, and to which number of tasks."""

from __future__ import annotations

from control_plane.api.autoscale import AutoscaleMode, starting_size
from control_plane.api.intent_changes import SizeChange
from control_plane.api.intents import Dimension, SizeIntent
from control_plane.api.jobs import JobRecord, JobSpec
from wire.errors import Conflict, InvalidInput


def size_of_file(spec: JobSpec, known: JobRecord | None, writer: str) -> int:
    """Return the size that a job has once its file is applied."""
    if known is None:
        return starting_size(spec.autoscale, spec.tasks, None)
    if is_autoscaled(known.spec):
        return starting_size(spec.autoscale, spec.tasks, known.spec.tasks)
    if may_size(known, writer):
        return starting_size(spec.autoscale, spec.tasks, None)
    return known.spec.tasks


def check_order(record: JobRecord, change: SizeChange, size: SizeIntent) -> None:
    """Raise `InvalidInput` for new bounds with the minimum above the maximum."""
    least, most = size.minimum, size.maximum
    is_new = change.minimum is not None or change.maximum is not None
    if is_new and least is not None and most is not None and least > most:
        raise InvalidInput(
            f"cannot write the size of job {record.name!r}: its minimum of {least} would be above"
            f" its maximum of {most}",
            hint="give --minimum and --maximum together",
        )


def check_bounds(record: JobRecord, tasks: int) -> None:
    """Raise `Conflict` for a size outside the bounds of an autoscaled job."""
    policy = record.spec.autoscale
    if policy is None or not is_autoscaled(record.spec):
        return
    if not policy.minimum <= tasks <= policy.maximum:
        raise Conflict(
            f"cannot resize job {record.name!r} to {tasks} tasks: its [autoscale] bounds are"
            f" {policy.minimum} to {policy.maximum}",
            hint="change minimum or maximum in its file, and apply it",
        )


def is_autoscaled(spec: JobSpec) -> bool:
    """Return whether the autoscaler sets the size of a job."""
    return spec.autoscale is not None and spec.autoscale.mode is AutoscaleMode.APPLY


def owns_size(known: JobRecord, writer: str) -> bool:
    """Return whether a writer owns the size of a job."""
    size = known.intents.get(Dimension.SIZE)
    return size is not None and size.is_owned and size.writer == writer


def may_size(known: JobRecord, writer: str) -> bool:
    """Return whether a writer may set the size of a job: no other one owns it."""
    size = known.intents.get(Dimension.SIZE)
    return size is None or not size.is_owned or size.writer == writer
