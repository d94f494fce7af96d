"""How a job is stored: a small intent, and its tasks in chunks.

Chunks keep a value below 256 KiB, and a change of one task writes one chunk, whatever the size of
the job. Reports of agents are not stored: after a start the control plane reads them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from agent.api import DisconnectPolicy
from control_plane.api.intents import StoredIntent
from control_plane.api.job_changes import task_changes
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord, task_id
from control_plane.api.operations import Operation
from control_plane.api.updates import Rollout

CHUNK = 256
"""Indexes per chunk: 59 chunks of the largest job, and below 1 KiB for each task."""


class StoredTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One task, without its agent's report."""

    index: int
    version: int
    generation: int
    phase: TaskPhase = TaskPhase.PENDING
    machine: str = ""
    """Its machine; empty: it has none."""
    ports: list[tuple[int, int]] = []
    """Pairs of an index of the chunk's `port_names`, and the port on the machine."""
    listed: bool = False
    since: float = 0.0
    attempts: int = 0
    avoid: str = ""
    operation: Operation | None = None
    extra: bool = False
    address: str = ""


class TaskChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks with the indexes from `number * CHUNK` to the next multiple of `CHUNK`."""

    schema: int = 1
    number: int
    port_names: list[str] = []
    """Names of ports, each once: 16 long names would be most of a task's size."""
    tasks: list[StoredTask] = []
    leaving: dict[str, list[int]] = {}
    """Machine → indexes of tasks that must be gone there."""
    lasting: dict[str, list[int]] | None = None
    """The part of `leaving` that may run until its machine answers. None: an earlier release wrote
    it; then the newest version's `disconnect` counts."""


class JobIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The stored record of a job, without its tasks."""

    schema: int = 2
    name: str
    spec: JobSpec
    version: int
    specs: dict[int, JobSpec] = {}
    stopping: bool = False
    paused: bool = False
    rollout: Rollout | None = None
    created_at: float = 0.0
    generation: int = 0
    operations: int = 0
    asked: int = 0
    numbered: int = 0
    reported: int = msgspec.field(name="told", default=0)
    intents: dict[str, StoredIntent] = {}
    trials: tuple[int, ...] = ()
    highest: int = 0


class RetiredJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about a removed job that a later job of the same name needs."""

    generation: int = 0
    """The highest generation given to any of its tasks."""
    asked: int = 0
    """Upper bound of the numbers of its controller calls."""
    leaving: dict[str, list[str]] = {}
    """Machine → task ids that may still run there: it was cut off when the job was removed."""
    lasting: dict[str, list[str]] = {}
    """Those of them that may run until their machine answers. A new job of the same name waits for
    them (BUG-CP30)."""


LEAVING_MAX = 1_000
"""Tasks of a retired job that are stored with their machines; bounds the size of the record."""


def retired_of(record: JobRecord) -> RetiredJob:
    """Return the facts to keep about a job that is removed."""
    tasks = sum(len(ids) for ids in record.leaving.values())
    leaving = record.leaving if tasks <= LEAVING_MAX else {}
    both = {
        machine: sorted({*leaving.get(machine, ()), *record.lasting.get(machine, ())})
        for machine in {**leaving, **record.lasting}
    }
    return RetiredJob(
        generation=record.generation,
        asked=max(record.asked, record.numbered),
        leaving=both,
        lasting=record.lasting,
    )


def read_retired(value: bytes) -> RetiredJob:
    """Return the stored facts about a removed job; earlier releases stored only its generation."""
    if value.isdigit():
        return RetiredJob(generation=int(value))
    return msgspec.json.decode(value, type=RetiredJob)


_INTENT_FIELDS = tuple(name for name in JobIntent.__struct_fields__ if name != "schema")
"""The fields that an intent and a record have in common."""
_intent_values = attrgetter(*_INTENT_FIELDS)


def intent_of(record: JobRecord) -> JobIntent:
    """Return the part of a record that is stored as its intent."""
    return JobIntent(**{name: getattr(record, name) for name in _INTENT_FIELDS})


def same_intent(before: JobRecord, after: JobRecord) -> bool:
    """Return whether two records have the same intent."""
    same: bool = _intent_values(before) == _intent_values(after)
    return same


def same_stored(before: TaskRecord, after: TaskRecord) -> bool:
    """Return whether two records of a task are stored the same; agents' reports do not count."""
    return before is after or (
        before.phase is after.phase
        and before.generation == after.generation
        and before.version == after.version
        and before.placement == after.placement
        and before.listed == after.listed
        and before.attempts == after.attempts
        and before.avoid == after.avoid
        and before.since == after.since
        and before.operation == after.operation
        and before.extra == after.extra
        and before.address == after.address
    )


def chunks_of(record: JobRecord) -> dict[int, TaskChunk]:
    """Return the chunks of a record by number, without empty ones."""
    return dict(chunks_in_turn(record))


def chunks_in_turn(
    record: JobRecord, only: set[int] | None = None
) -> Iterator[tuple[int, TaskChunk]]:
    """Yield the chunks of a record by number (or `only` some), each made when its turn comes."""
    tasks: dict[int, list[TaskRecord]] = {}
    for task in record.tasks:
        if only is None or task.index // CHUNK in only:
            tasks.setdefault(task.index // CHUNK, []).append(task)
    leaving = _indexes_by_chunk(record.leaving, only)
    lasting = _indexes_by_chunk(record.lasting, only)
    for number in sorted(tasks.keys() | leaving.keys()):
        left = leaving.get(number, {}), lasting.get(number, {})
        yield number, _chunk(number, tasks.get(number, []), *left)


def chunk_numbers(record: JobRecord) -> set[int]:
    """Return the numbers of the chunks that a record has."""
    numbers = {task.index // CHUNK for task in record.tasks}
    return numbers | {index // CHUNK for _, index in _indexes(record.leaving)}


def changed_chunks(before: JobRecord, after: JobRecord) -> set[int]:
    """Return the numbers of the chunks in which two records differ."""
    changed = set[int]()
    for old, task in task_changes(before, after):
        if old is None or task is None:
            changed.update(one.index // CHUNK for one in (old, task) if one is not None)
        elif task.index // CHUNK not in changed and not same_stored(old, task):
            changed.add(task.index // CHUNK)
    for was, now in ((before.leaving, after.leaving), (before.lasting, after.lasting)):
        if was != now:
            differ = set(_indexes(was)) ^ set(_indexes(now))
            changed |= {index // CHUNK for _, index in differ}
    return changed


def record_of(intent: JobIntent, chunks: Iterable[TaskChunk]) -> JobRecord:
    """Return the record that an intent and its chunks make."""
    tasks: list[TaskRecord] = []
    leaving: dict[str, list[str]] = {}
    lasting: dict[str, list[str]] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.number):
        tasks += [_task(stored, chunk.port_names) for stored in chunk.tasks]
        may_last = chunk.lasting
        if may_last is None:
            keeps = intent.spec.disconnect.policy is DisconnectPolicy.KEEP
            may_last = chunk.leaving if keeps else {}
        for stored_left, left in ((chunk.leaving, leaving), (may_last, lasting)):
            for machine, indexes in stored_left.items():
                left.setdefault(machine, []).extend(task_id(intent.name, i) for i in indexes)
    return JobRecord(
        **{name: getattr(intent, name) for name in _INTENT_FIELDS},
        tasks=tasks,
        leaving={machine: sorted(ids) for machine, ids in sorted(leaving.items())},
        lasting={machine: sorted(ids) for machine, ids in sorted(lasting.items())},
    )


def merged(
    record: JobRecord, intent: JobIntent, chunks: Mapping[int, TaskChunk | None]
) -> JobRecord:
    """Return a record with another intent and some chunks replaced (None: removed).

    Tasks whose record did not change stay the same objects, with the last reports of agents.
    """
    changed = record_of(intent, filter(None, chunks.values()))
    known = {task.index: task for task in record.tasks}
    tasks = [task for task in record.tasks if task.index // CHUNK not in chunks]
    for task in changed.tasks:
        old = known.get(task.index)
        tasks.append(old if old is not None and same_stored(old, task) else task)
    return msgspec.structs.replace(
        changed,
        tasks=sorted(tasks, key=lambda task: task.index),
        leaving=_with_others(changed.leaving, record.leaving, chunks),
        lasting=_with_others(changed.lasting, record.lasting, chunks),
    )


def _with_others(
    replaced: Mapping[str, list[str]],
    known: Mapping[str, list[str]],
    chunks: Mapping[int, TaskChunk | None],
) -> dict[str, list[str]]:
    """Return tasks by machine: those of replaced chunks as they are now, and all others."""
    found = {machine: list(ids) for machine, ids in replaced.items()}
    for machine, ids in known.items():
        stay = [name for name in ids if int(name.rpartition("-")[2]) // CHUNK not in chunks]
        if stay:
            found[machine] = sorted([*found.get(machine, ()), *stay])
    return dict(sorted(found.items()))


def _indexes(left: Mapping[str, list[str]]) -> Iterable[tuple[str, int]]:
    """Yield machine and index of each task."""
    for machine, ids in left.items():
        for name in ids:
            yield machine, int(name.rpartition("-")[2])


def _indexes_by_chunk(
    left: Mapping[str, list[str]], only: set[int] | None
) -> dict[int, dict[str, list[int]]]:
    found: dict[int, dict[str, list[int]]] = {}
    for machine, index in _indexes(left):
        if only is None or index // CHUNK in only:
            found.setdefault(index // CHUNK, {}).setdefault(machine, []).append(index)
    return found


def _chunk(
    number: int,
    tasks: Iterable[TaskRecord],
    leaving: Mapping[str, list[int]],
    lasting: Mapping[str, list[int]],
) -> TaskChunk:
    names: dict[str, int] = {}
    stored = []
    for task in tasks:
        where = task.placement
        ports = where.ports.items() if where is not None else ()
        stored.append(
            StoredTask(  # each field by hand: by name it takes 20 times as long
                index=task.index,
                version=task.version,
                generation=task.generation,
                phase=task.phase,
                machine=where.machine if where is not None else "",
                ports=[(names.setdefault(name, len(names)), port) for name, port in ports],
                listed=task.listed,
                since=task.since,
                attempts=task.attempts,
                avoid=task.avoid,
                operation=task.operation,
                extra=task.extra,
                address=task.address,
            )
        )
    return TaskChunk(
        number=number,
        port_names=list(names),
        tasks=stored,
        leaving={machine: sorted(leaving[machine]) for machine in sorted(leaving)},
        lasting={machine: sorted(lasting[machine]) for machine in sorted(lasting)},
    )


def _task(stored: StoredTask, names: list[str]) -> TaskRecord:
    placement = None
    if stored.machine:
        ports = {names[name]: port for name, port in stored.ports}
        placement = Placement(machine=stored.machine, ports=ports)
    return TaskRecord(
        index=stored.index,
        version=stored.version,
        generation=stored.generation,
        phase=stored.phase,
        placement=placement,
        listed=stored.listed,
        since=stored.since,
        attempts=stored.attempts,
        avoid=stored.avoid,
        operation=stored.operation,
        extra=stored.extra,
        address=stored.address,
    )
