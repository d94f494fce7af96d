"""Writes of a job's record: each yields the specification to check, and the new record.

Both are made from the record under the job's lock. So a write of one dimension
never restores an older state of another (JC15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from control_plane.api.intent_changes import CanaryChange, IntentChange, PushChange, SizeChange
from control_plane.api.intents import CanaryIntent, Dimension, SizeIntent
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.job_control.core.intents import (
    canary_of,
    check_writer,
    is_held,
    is_plain,
    next_version,
    pushed,
    runtime_of,
    size_of,
    sized,
    stable_of,
    written,
)
from control_plane.scheduler.core.job_check import same_tasks
from control_plane.scheduler.core.job_size import (
    check_bounds,
    check_order,
    is_autoscaled,
    owns_size,
    size_of_file,
)
from control_plane.scheduler.core.release import (
    restored_spec,
    resumed,
    with_restored_version,
    with_rollout,
    with_version,
)
from wire.errors import Conflict, InvalidInput, NotFound


@dataclass(frozen=True, slots=True)
class JobChange:
    """One write: the functions that make the new specification and record."""

    job: str
    spec: Callable[[JobRecord | None], JobSpec]
    """The present record → the specification to check."""
    record: Callable[[JobRecord, JobSpec], JobRecord]
    """The present record, and the checked specification → the record to store."""
    moves: bool = False
    """It may move the job to another entitlement."""
    must_fit: int | None = None
    """At least this many tasks must have room, others may wait for it (AS5); None: all."""
    is_resize: bool = False
    """What tasks run is unchanged, and was checked at its push. Only the entitlement's quota is
    checked again; tasks that find no room wait for it (AS5)."""

    def fitting(self, spec: JobSpec) -> JobSpec:
        """Return the specification with the tasks that must have room."""
        most = spec.tasks if self.must_fit is None else self.must_fit
        return replace(spec, tasks=min(spec.tasks, most))


def apply_change(spec: JobSpec, writer: str, now: float, *, is_new: bool = False) -> JobChange:
    """Return the write of a job file: a push to all tasks, and a size.

    A size that another writer owns stays; a push that another writer owns is refused. With
    `autoscale.mode = apply` the file leaves the size to the autoscaler, even if the writer took
    it over before. Without it the file sets the size again. With `is_new` a job that exists is
    refused.
    """

    def checked(known: JobRecord | None) -> JobSpec:
        if is_new and known is not None:
            owner = known.spec.entitlement
            raise Conflict(f"there is a job {spec.name!r} already, in entitlement {owner}")
        return replace(spec, tasks=size_of_file(spec, known, writer))

    def record(known: JobRecord, spec: JobSpec) -> JobRecord:
        after, is_new = _with_spec(known, replace(spec, tasks=known.spec.tasks)), not known.intents
        if after != known:
            check_writer(known, Dimension.PUSH, writer)
        if after.version != known.version or (is_new and not known.tasks):
            after = pushed(after, writer, now)
        is_given_back = is_autoscaled(spec) and owns_size(known, writer)
        is_new_size = spec.tasks != size_of(known).tasks or is_given_back
        if is_new_size or (is_new and not known.tasks):
            size = replace(size_of(known), tasks=spec.tasks)
            after = written(after, Dimension.SIZE, size, writer, now)
        return sized(after)

    return JobChange(spec.name, checked, record, must_fit=spec.tasks)


def rollback_change(
    name: str, version: int, writer: str, now: float, expect: int | None = None
) -> JobChange:
    """Return the write that applies an earlier version's specification again.

    It raises `Conflict` if the job is not at version `expect`; None: at any version.
    """

    def checked(known: JobRecord | None) -> JobSpec:
        record = _require_version(
            require_not_stopping(_require_job(known, name)), expect, "roll back"
        )
        if version not in record.specs:  # another write has made it superfluous
            raise Conflict(f"job {name!r} was changed by another request", hint="roll back again")
        return restored_spec(record.spec, record.specs[version])

    def record(known: JobRecord, spec: JobSpec) -> JobRecord:
        reason = f"its owner restored version {version} instead of {known.version}"
        return pushed(with_restored_version(known, spec, reason), writer, now, reason=reason)

    return JobChange(name, checked, record, moves=True)


def move_change(name: str, entitlement: str, writer: str, now: float) -> JobChange:
    """Return the write that moves a job to another entitlement, as a push to all tasks."""

    def checked(known: JobRecord | None) -> JobSpec:
        record = require_not_stopping(_require_job(known, name))
        require_one_version(record, "moved")
        return replace(record.spec, entitlement=entitlement)

    def record(known: JobRecord, spec: JobSpec) -> JobRecord:
        return pushed(_with_spec(known, spec), writer, now, reason=f"moved to {entitlement}")

    return JobChange(name, checked, record, moves=True)


def push_change(name: str, change: PushChange, writer: str, now: float) -> JobChange:
    """Return the write of the push intent.

    A push of an earlier image with everything else unchanged goes back to that version: tasks that
    still run it are not restarted.
    """

    def checked(known: JobRecord | None) -> JobSpec:
        record = require_not_stopping(_require_job(known, name))
        check_writer(record, Dimension.PUSH, writer, change)
        if (version := _goes_back_to(record, change)) is not None:
            return restored_spec(record.spec, record.specs[version])
        spec, configuration = change.spec or record.spec, change.configuration
        if configuration is None:
            configuration = spec.configuration
        image = change.image or spec.image
        return replace(spec, tasks=record.spec.tasks, image=image, configuration=configuration)

    def record(known: JobRecord, spec: JobSpec) -> JobRecord:
        if _goes_back_to(known, change) is None:
            after = _with_spec(known, spec)
        else:
            reason = change.reason or f"{writer} pushed the earlier image again"
            after = with_restored_version(known, spec, reason)
        is_part = change.share < 1.0 or change.tasks is not None
        if is_part and not stable_of(with_rollout(after)):
            raise Conflict(
                f"cannot push to a part of job {name!r}: no earlier version of it is known that "
                "the other tasks could run in its entitlement",
                hint="push to all tasks (share 1)",
            )
        return pushed(
            after,
            writer,
            now,
            share=change.share,
            tasks=change.tasks,
            reason=change.reason,
            is_owned=not change.gives_back,
        )

    return JobChange(name, checked, record)


def _goes_back_to(record: JobRecord, change: PushChange) -> int | None:
    """Return the version that a push of an image to all tasks goes back to; None: it is new."""
    is_whole = change.share >= 1.0 and change.tasks is None
    if change.spec is not None or not is_whole or change.image in (None, record.spec.image):
        return None
    now = record.spec
    return max(
        (
            version
            for version, then in record.specs.items()
            if version < record.version
            and version not in record.trials
            and then.image == change.image
            and same_tasks(replace(then, image=now.image, runtime=now.runtime), now)
        ),
        default=None,
    )


def size_change(name: str, change: SizeChange, writer: str, now: float) -> JobChange:
    """Return the write of the size intent."""

    def size(record: JobRecord) -> SizeIntent:
        known = size_of(record)
        least = known.minimum if change.minimum is None else change.minimum
        most = known.maximum if change.maximum is None else change.maximum
        return SizeIntent(tasks=change.tasks, minimum=least, maximum=most)

    def checked(known: JobRecord | None) -> JobSpec:
        record = require_not_stopping(_require_job(known, name))
        check_writer(record, Dimension.SIZE, writer, change)
        check_order(record, change, size(record))
        tasks = size(record).wanted
        check_bounds(record, tasks)
        return replace(record.spec, tasks=tasks)

    def record(known: JobRecord, _: JobSpec) -> JobRecord:
        value, reason = size(known), change.reason
        return sized(
            written(known, Dimension.SIZE, value, writer, now, reason=reason, is_owned=True)
        )

    return JobChange(name, checked, record, is_resize=True)


def canary_change(name: str, change: CanaryChange, writer: str, now: float) -> JobChange:
    """Return the write of the canary intent: its variant is a version of its own."""

    def checked(known: JobRecord | None) -> JobSpec:
        record = require_not_stopping(_require_job(known, name))
        check_writer(record, Dimension.CANARY, writer, change)
        return _variant(record, change)

    def record(known: JobRecord, spec: JobSpec) -> JobRecord:
        canary, version = canary_of(known), next_version(known)
        if canary is not None and same_tasks(known.specs[canary.version], spec):
            version = canary.version  # the same canary, for longer or on more tasks
        intent = CanaryIntent(
            version=version,
            tasks=change.tasks,
            share=change.share,
            machine_type=change.machine_type or "",
            traffic=change.traffic,
        )
        after = replace(
            known,
            specs=known.specs | {version: spec},
            trials=tuple(sorted({*known.trials, version})),
            highest=max(known.highest, version),
        )
        return written(
            after,
            Dimension.CANARY,
            intent,
            writer,
            now,
            reason=change.reason,
            lasts_s=change.lasts_s,
            is_owned=True,
        )

    return JobChange(name, checked, record)


def _variant(record: JobRecord, change: CanaryChange) -> JobSpec:
    """Return what a canary runs: the version of the other tasks, with its changes."""
    base = record.specs.get(stable_of(with_rollout(record)), record.spec)
    if change.traffic is not None and not base.ports:
        raise InvalidInput(
            f"cannot give a canary of job {record.name!r} {change.traffic:.2%} of the requests: "
            "the job has no port for clients",
            hint="leave traffic out, or add `ports` to the job file",
        )
    return replace(
        restored_spec(record.spec, base),
        image=change.image or base.image,
        command=base.command if change.command is None else change.command,
        environment=base.environment | change.environment,
        configuration=base.configuration | change.configuration,
    )


# -- records


def with_intent(
    record: JobRecord,
    dimension: Dimension,
    value: Struct | None,
    change: IntentChange,
    writer: str,
    now: float,
    lasts_s: float | None = None,
) -> JobRecord:
    """Return the record with an intent that changes no specification, or without it (`None`)."""
    record = require_not_stopping(record)
    check_writer(record, dimension, writer, change)
    known = record.intents.get(dimension)
    if value is None and (known is None or known.value is None):
        return record  # it ended by itself already
    after = written(
        record,
        dimension,
        value,
        writer,
        now,
        reason=change.reason,
        lasts_s=lasts_s,
        is_owned=value is not None,
    )
    return sized(after)


def require_not_stopping(record: JobRecord) -> JobRecord:
    """Return the record; `Conflict` for a job that is being stopped."""
    if record.stopping:
        raise Conflict(
            f"job {record.name!r} is being stopped",
            hint="wait until `twinectl job status` no longer shows it",
        )
    return record


def require_one_version(record: JobRecord, verb: str) -> None:
    """Raise `Conflict` unless all tasks are to run one version."""
    if not is_plain(record):
        why = "it is held" if is_held(record) else "its tasks are not all meant to run one version"
        raise Conflict(
            f"job {record.name!r} cannot be {verb}: {why}",
            hint=f"twinectl job intents {record.name}; finish the push, end the canary or the hold",
        )


def restarted(record: JobRecord, writer: str, now: float, expect: int | None = None) -> JobRecord:
    """Return the record in which every task is to be restarted.

    Raises `Conflict` if the job is not at version `expect`; None: at any version.
    """
    require_one_version(
        _require_version(require_not_stopping(record), expect, "restart"), "restarted"
    )
    after = with_version(record, _with_runtime(record, record.spec))
    return pushed(after, writer, now, reason="restart")


def paused(record: JobRecord, *, held_back: bool, expect: int | None = None) -> JobRecord:
    """Return the record paused, or resumed: then failures that halted it are forgiven, too.

    Raises `Conflict` if the job is not at version `expect`; None: at any version.
    """
    record = _require_version(
        require_not_stopping(record), expect, "pause" if held_back else "resume"
    )
    return replace(record if held_back else resumed(record), paused=held_back)


def _require_version(record: JobRecord, expect: int | None, verb: str) -> JobRecord:
    """Return the record; `Conflict` if it is not at the version that a request is for."""
    if expect not in (None, record.version):
        raise Conflict(
            f"cannot {verb} job {record.name!r}: it is at version {record.version}, and the"
            f" request is for version {expect}",
            hint=f"twinectl job status {record.name}, and send the request for that version",
        )
    return record


def _with_spec(record: JobRecord, spec: JobSpec) -> JobRecord:
    """Return the record with a specification; only a change of what tasks run is a new version."""
    record, spec = require_not_stopping(record), replace(spec, runtime=record.spec.runtime)
    if same_tasks(record.spec, spec):
        specs = record.specs | {record.version: spec}
        return replace(record, spec=spec, specs=specs)
    return with_version(record, _with_runtime(record, spec))


def _with_runtime(record: JobRecord, spec: JobSpec) -> JobSpec:
    """Return the specification with the runtime that the operators want now (JC9)."""
    return replace(spec, runtime=runtime_of(record) or record.spec.runtime)


def _require_job(known: JobRecord | None, name: str) -> JobRecord:
    if known is None:
        raise NotFound(f"there is no job {name!r}", hint="twinectl job list")
    return known
