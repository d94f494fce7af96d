"""Reads, writes and ends the intents in a job's record; each has one writer.

Writes of different dimensions change different entries, so their order does not matter (JC15).
A write may name the version of its dimension that it replaces. If the writer has read an older
version, it gets `Conflict` and nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from control_plane.api.intent_changes import IntentChange, IntentView
from control_plane.api.intents import (
    CanaryIntent,
    Dimension,
    InfrastructureIntent,
    PushIntent,
    SizeIntent,
    StoredIntent,
)
from control_plane.api.job_changes import has_same_tasks_and_specs
from control_plane.api.jobs import JobRecord, TaskPhase, TaskRecord
from control_plane.api.operations import OperationKind, OperationState
from control_plane.job_control.core.compose import (
    JobWants,
    Pushed,
    UnifiedSpec,
    Why,
)
from control_plane.job_control.core.traffic import describe_traffic
from wire.errors import Conflict

_ENDING = (TaskPhase.DRAINING, TaskPhase.STOPPING)
_NOTHING = StoredIntent()
_KNOWN = frozenset(Dimension)
WITHDRAWABLE = (Dimension.CANARY, Dimension.HOLD)
"""Other dimensions always have a value: a writer replaces it."""


# -- reading


def push_of(record: JobRecord) -> PushIntent:
    """Return the pushed version; without a push intent, the job's version for all tasks."""
    known = _value(record, Dimension.PUSH)
    if known is None:
        return PushIntent(version=record.version)
    return msgspec.convert(known, PushIntent)


def size_of(record: JobRecord) -> SizeIntent:
    """Return the wanted size; without such an intent, the size in force."""
    known = _value(record, Dimension.SIZE)
    if known is None:
        return SizeIntent(tasks=record.spec.tasks)
    return msgspec.convert(known, SizeIntent)


def canary_of(record: JobRecord) -> CanaryIntent | None:
    """Return the canary, if there is one."""
    known = _value(record, Dimension.CANARY)
    return None if known is None else msgspec.convert(known, CanaryIntent)


def runtime_of(record: JobRecord) -> str:
    """Return the runtime that operators chose; empty: they chose none."""
    known = _value(record, Dimension.INFRASTRUCTURE)
    return "" if known is None else msgspec.convert(known, InfrastructureIntent).runtime


def is_held(record: JobRecord) -> bool:
    """Return whether a hold is in force (`lapsed` withdraws it at its end)."""
    return _value(record, Dimension.HOLD) is not None


def is_plain(record: JobRecord) -> bool:
    """Return whether the update to the newest version is to reach all tasks."""
    intents = record.intents
    if not intents:
        return True
    if record.trials or is_held(record):
        return False
    push = _value(record, Dimension.PUSH)
    return push is None or (push.get("tasks") is None and push.get("share", 1.0) >= 1.0)


def target_of(record: JobRecord, task: TaskRecord) -> int:
    """Return the version that a task should run; its own if none was composed."""
    if task.wants:
        return task.wants
    return record.version if is_plain(record) else task.version


def on_its_way_to(record: JobRecord, task: TaskRecord) -> int:
    """Return the version that a task runs, or starts with after its present stop."""
    operation = task.operation
    if (
        operation is not None
        and operation.kind is OperationKind.UPDATE
        and operation.state is OperationState.RUNNING
        and task.phase in _ENDING
    ):
        return target_of(record, task)
    return task.version


def is_on_trial(record: JobRecord, task: TaskRecord) -> bool:
    """Return whether a task is a canary, or still runs the version of an earlier canary."""
    trials = record.trials
    return bool(trials) and (task.wants in trials or on_its_way_to(record, task) in trials)


def stable_of(record: JobRecord) -> int:
    """Return the version of the tasks outside the push; 0: there is none."""
    rollout = record.rollout
    if rollout is None or rollout.version != record.version:
        return 0
    base = record.specs.get(rollout.base)
    is_here = base is not None and base.entitlement == record.spec.entitlement
    return rollout.base if is_here else 0


def wanted_of(record: JobRecord) -> JobWants:
    """Return the intents of a job for `compose`."""
    push, canary = push_of(record), canary_of(record)
    stored, hold = record.intents.get(Dimension.CANARY), record.intents.get(Dimension.HOLD)
    held_until = None
    if hold is not None and hold.value is not None:
        held_until = hold.expires_at
    return JobWants(
        push=Pushed(record.version, stable_of(record), push.share, record.spec.runtime, push.tasks),
        size=SizeIntent(tasks=record.spec.tasks),
        canary=canary,
        canary_ends_at=None if stored is None else stored.expires_at,
        runtime=runtime_of(record),
        held_until=held_until,
        size_in_force=record.spec.tasks,
    )


def waits_for_hold(record: JobRecord) -> str:
    """Describe the changes that a hold postpones; empty: none, or there is no hold."""
    if not is_held(record):
        return ""
    size, hold = size_of(record).wanted, record.intents[Dimension.HOLD]
    waits = [
        f"version {record.version}"
        if any(t.version not in (record.version, *record.trials) for t in record.tasks)
        else "",
        f"the size of {size}" if size != record.spec.tasks else "",
    ]
    what = " and ".join(filter(None, waits))
    why = f" ({hold.reason})" if hold.reason else ""
    return what and f"the job is held{why}: {what} waits"


def next_end(record: JobRecord) -> float | None:
    """Return when the next intent ends by itself, in seconds since 1970; None: none does."""
    return min((end for _, end in _ends(record)), default=None)


# -- writing


def check_writer(
    record: JobRecord, dimension: Dimension, writer: str, change: IntentChange | None = None
) -> None:
    """Raise `Conflict` if another writer owns the dimension, or wrote it since the caller read it.

    Without a `change`, an action on the whole job writes it, such as `job apply`: this never takes
    over. An empty `writer` is the region itself.
    """
    known = record.intents.get(dimension, _NOTHING)
    show = f"twinectl job intents {record.name}"
    if change is not None and change.expect is not None and change.expect != known.version:
        raise Conflict(
            f"cannot write the {dimension} of job {record.name!r}: it is at version "
            f"{known.version}, and the request replaces version {change.expect}",
            hint=f"{show}, and send the change for that version",
        )
    takes_over = change is not None and change.take_over
    way = "--take-over" if change is not None else f"twinectl job adopt {record.name} --take-over"
    is_free = known.value is None or not known.is_owned or writer in ("", known.writer)
    if not (is_free or takes_over):
        raise Conflict(
            f"cannot write the {dimension} of job {record.name!r}: {known.writer} is its writer",
            hint=f"{show}; {way} makes you its writer",
        )


def written(
    record: JobRecord,
    dimension: Dimension,
    value: msgspec.Struct | None,
    writer: str,
    now: float,
    *,
    reason: str = "",
    lasts_s: float | None = None,
    is_owned: bool = False,
) -> JobRecord:
    """Return the record with one intent written or (without a value) withdrawn."""
    known = record.intents.get(dimension, _NOTHING)
    content: dict[str, Any] | None = None
    traffic = known.traffic if known.value is None else known.value.get("traffic")
    if value is not None:
        content, traffic = msgspec.to_builtins(value), None
    intent = StoredIntent(
        writer=writer,
        version=known.version + 1,
        reason=reason,
        since=now,
        expires_at=None if lasts_s is None else now + lasts_s,
        is_owned=is_owned,
        value=content,
        traffic=traffic,
    )
    return replace(record, intents=record.intents | {str(dimension): intent})


def pushed(
    record: JobRecord,
    writer: str,
    now: float,
    *,
    share: float = 1.0,
    tasks: int | None = None,
    reason: str = "",
    is_owned: bool = False,
) -> JobRecord:
    """Return the record whose newest version is the pushed one."""
    value = PushIntent(version=record.version, share=share, tasks=tasks)
    return written(record, Dimension.PUSH, value, writer, now, reason=reason, is_owned=is_owned)


def sized(record: JobRecord) -> JobRecord:
    """Return the record with the size that is wanted in force, unless the job is held."""
    tasks = size_of(record).wanted
    if tasks == record.spec.tasks or is_held(record):
        return record
    spec = replace(record.spec, tasks=tasks)
    return replace(record, spec=spec, specs=record.specs | {record.version: spec})


def lapsed(record: JobRecord, now: float) -> JobRecord:
    """Return the record without the intents whose time is over; `now` is in seconds since 1970."""
    end = next_end(record)
    if end is None or now < end:
        return record
    for dimension, ends_at in _ends(record):
        if now >= ends_at:
            writer, reason = record.intents[dimension].writer, "its time has expired"
            record = written(record, Dimension(dimension), None, writer, now, reason=reason)
    return sized(record)


def writes_of(record: JobRecord) -> int:
    """Return how often the intents of a job were written: it rises with each write."""
    return sum(intent.version for intent in record.intents.values())


def is_composed(record: JobRecord) -> bool:
    """Return whether the intents have been composed into a version for each task."""
    return record.composed == (0 if is_plain(record) else writes_of(record))


def ask_the_same(before: JobRecord, after: JobRecord) -> bool:
    """Return whether a write of intents changed only their writer, time and reason.

    An autoscaler writes most sizes only to confirm them. The comparison is possible for plain jobs:
    their specification contains everything that their intents want.
    """
    return (
        has_same_tasks_and_specs(before, after)
        and is_plain(after)
        and is_composed(after)
        and next_end(after) is None
        and is_plain(before)
        and replace(after, intents=before.intents) == before
    )


def next_version(record: JobRecord) -> int:
    """Return the number of the next version; numbers are never used twice."""
    return max(record.version, record.highest) + 1


def _ends(record: JobRecord) -> list[tuple[str, float]]:
    """Return (dimension, end) of the intents of known dimensions that end by themselves."""
    return [
        (dimension, intent.expires_at)
        for dimension, intent in record.intents.items()
        if intent.expires_at is not None and intent.value is not None and dimension in _KNOWN
    ]


def _value(record: JobRecord, dimension: Dimension) -> dict[str, Any] | None:
    known = record.intents.get(dimension)
    return None if known is None else known.value


# -- showing


def views(record: JobRecord, unified: UnifiedSpec) -> list[IntentView]:
    """Return every dimension that was ever written, the strongest first, with its effect now."""
    effects = _effects(record, unified)
    known = [dimension for dimension in Dimension if dimension in record.intents]
    waits = dict(unified.waits)
    if is_held(record) and size_of(record).wanted != unified.size:
        waits[Dimension.SIZE] = Why.HOLD
    if canary_of(record) is not None and (lacks := describe_traffic(record)[1]):
        waits[Dimension.CANARY] = "; ".join(filter(None, (waits.get(Dimension.CANARY), lacks)))
    shown = [
        _view(record.intents[dimension], dimension, effects[dimension], waits)
        for dimension in known
    ]
    for name in sorted(record.intents.keys() - set(Dimension)):
        effect = "none: this release does not support the dimension"
        shown.append(IntentView(dimension=name, intent=record.intents[name], effect=effect))
    return shown


def _effects(record: JobRecord, unified: UnifiedSpec) -> dict[Dimension, str]:
    """Return what each dimension does now, if it has a value."""
    counts = Counter(task.version for task in unified.tasks.values())
    canary, size = canary_of(record), size_of(record)
    return {
        Dimension.HOLD: "no change that an intent asks for begins",
        Dimension.PUSH: f"{counts[record.version]} of {_tasks(unified.size)} should run version "
        f"{record.version}",
        Dimension.SIZE: f"{_tasks(unified.size)}{_bounds(size, unified.size)}",
        Dimension.CANARY: f"{_tasks(counts[canary.version])} should run version {canary.version}"
        + describe_traffic(record)[0]
        if canary is not None
        else "",
        Dimension.INFRASTRUCTURE: "the push runs "
        + (f"runtime {unified.runtime}" if unified.runtime else "the runtime of its agents"),
    }


def _tasks(number: int) -> str:
    return f"{number} task{'' if number == 1 else 's'}"


def _bounds(size: SizeIntent, now: int) -> str:
    parts = [
        f"{size.tasks} requested" if size.tasks != now else "",
        "" if size.minimum is None else f"at least {size.minimum}",
        "" if size.maximum is None else f"at most {size.maximum}",
    ]
    words = ", ".join(filter(None, parts))
    return words and f" ({words})"


def _view(
    intent: StoredIntent, dimension: Dimension, effect: str, waits: Mapping[Dimension, str]
) -> IntentView:
    if intent.value is None:
        return IntentView(dimension=dimension, intent=intent, effect="none: it was withdrawn")
    return IntentView(
        dimension=dimension,
        intent=intent,
        effect=effect,
        waits_for=waits.get(dimension, ""),
    )
