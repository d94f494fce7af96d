"""The delivery service's own store: pipelines, their ended runs, and all verdicts."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from control_plane.store import Delete, Entry, Operation, Put, Store
from control_plane.store.bounds import ROWS_MAX
from control_plane.store.records import DamagedRecord, packed, unpacked
from conveyor.runs import GateVerdict, PipelineRecord, PipelineRun, StoredRun, StoredVerdict
from wire.errors import ConfigError, TwineError

log = logging.getLogger(__name__)
PIPELINES, RUNS, VERDICTS = "pipelines/", "runs/", "verdicts/"
SCHEMA = 1
"""The newest schema that this release reads."""
RUNS_KEPT = 100
"""Ended runs of each pipeline that are kept, with their verdicts."""


class _SchemaOnly(msgspec.Struct):
    schema: int = SCHEMA


T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class StoredPipeline:
    """A record and the revision it was read or written at; 0: it is not stored yet."""

    record: PipelineRecord
    revision: int


@dataclass(frozen=True, slots=True)
class DamagedPipeline:
    """A stored pipeline that cannot be read; it stays in the store as it is."""

    reason: str
    revision: int


class DeliveryRecords:
    """Reads and writes the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def failure(self) -> str:
        """Return why this process may no longer act, for instance a lost lease; empty: it may."""
        return self._store.failure()

    async def all(self) -> tuple[dict[str, StoredPipeline], dict[str, DamagedPipeline]]:
        """Return every pipeline by name: those that can be read, and the damaged ones."""
        known, damaged = dict[str, StoredPipeline](), dict[str, DamagedPipeline]()
        for entry in (await self._store.list_prefix(PIPELINES)).entries:
            name = entry.key.removeprefix(PIPELINES)
            try:
                record = decoded(entry.value, PipelineRecord, entry.key)
            except DamagedRecord as e:
                damaged[name] = DamagedPipeline(str(e), entry.revision)
                log.error("a pipeline is damaged", extra={"pipeline": name, "reason": str(e)})
            else:
                known[name] = StoredPipeline(record, entry.revision)
        return known, damaged

    async def get(self, name: str) -> StoredPipeline | None:
        """Return a pipeline as it is stored."""
        entry = await self._store.get(PIPELINES + name)
        if entry is None:
            return None
        return StoredPipeline(decoded(entry.value, PipelineRecord, entry.key), entry.revision)

    async def write(
        self, known: StoredPipeline, record: PipelineRecord, ended: tuple[PipelineRun, ...] = ()
    ) -> StoredPipeline:
        """Store a changed record with its new runs and verdicts, all or nothing.

        Raises `Conflict` if another process wrote the pipeline meanwhile. Afterwards it deletes
        the runs beyond the kept number; if that fails, the end of the next run repeats it.
        """
        name = record.spec.name
        operations: list[Operation] = [Put(PIPELINES + name, encoded(record))]
        for run in ended:
            key = _run_key(name, run.number)
            operations.append(Put(key, encoded(StoredRun(run=run))))
        for number, verdict in _new_verdicts(known.record, record):
            key = f"{_verdict_prefix(name, record.active)}{number:08d}"
            operations.append(Put(key, encoded(StoredVerdict(verdict=verdict))))
        revision = await self._store.txn({PIPELINES + name: known.revision}, operations)
        if ended:
            await self._drop_old(name, max(run.number for run in ended) - RUNS_KEPT)
        return StoredPipeline(record, revision)

    async def runs(self, record: PipelineRecord, limit: int) -> list[PipelineRun]:
        """Return the newest ended runs, newest first; damaged ones are left out."""
        entries = reversed(await self._newest(record, limit))
        return [stored.run for stored in _readable(entries, StoredRun)][:limit]

    async def last_change(self, record: PipelineRecord) -> PipelineRun | None:
        """Return the newest ended run that changed something.

        Raises `DamagedRecord` if a newer run is damaged: it may have changed something.
        """
        for entry in reversed(await self._newest(record, 20)):
            run = decoded(entry.value, StoredRun, entry.key).run
            if run.pushed:
                return run
        return None

    async def _newest(self, record: PipelineRecord, limit: int) -> tuple[Entry, ...]:
        """Return the stored rows of the newest ended runs, at least `limit` of them, oldest first.

        Each number below `next_run` belongs to one run, and at most two of these have not ended.
        """
        prefix, first = f"{RUNS}{record.spec.name}/", max(0, record.next_run - limit - 3)
        return tuple((await self._store.list_prefix(prefix, f"{prefix}{first:06d}")).entries)

    async def run(self, name: str, number: int) -> PipelineRun | None:
        """Return an ended run."""
        entry = await self._store.get(_run_key(name, number))
        return None if entry is None else decoded(entry.value, StoredRun, entry.key).run

    async def find_run(self, name: str, number: int) -> PipelineRun | None:
        """Return an ended run; None: its record was dropped, or is damaged."""
        try:
            return await self.run(name, number)
        except DamagedRecord as e:
            log.warning("a run is left out", extra={"pipeline": name, "reason": str(e)})
            return None

    async def verdicts(self, name: str, run: PipelineRun, limit: int | None) -> list[GateVerdict]:
        """Return the newest verdicts of a run, oldest first; `limit` None: all of them."""
        prefix = _verdict_prefix(name, run)
        first = 0 if limit is None else max(0, run.measured - limit)
        listing = await self._store.list_prefix(prefix, f"{prefix}{first:08d}")
        return [stored.verdict for stored in _readable(listing.entries, StoredVerdict)]

    async def remove(self, name: str, revision: int) -> None:
        """Remove the history of a pipeline, and then the pipeline.

        A history may need many transactions. If one fails, a repetition removes the rest.
        """
        for prefix in (f"{VERDICTS}{name}/", f"{RUNS}{name}/"):
            await self._delete_below(prefix)
        key = PIPELINES + name
        await self._store.txn({key: revision}, [Delete(key)])

    async def _drop_old(self, name: str, last: int) -> None:
        """Delete the ended runs up to a number, the verdicts of each run first.

        A failure is only logged, because the caller's record is stored already.
        """
        try:
            for entry in (await self._store.list_prefix(f"{RUNS}{name}/")).entries:
                number = entry.key.rpartition("/")[2]
                if int(number) > last:
                    return
                await self._delete_below(f"{VERDICTS}{name}/{number}/")
                await self._store.txn({}, [Delete(entry.key)])
        except TwineError as e:
            log.warning("old runs were not deleted", extra={"pipeline": name, "reason": str(e)})

    async def _delete_below(self, prefix: str) -> None:
        while entries := (await self._store.list_prefix(prefix, "", ROWS_MAX)).entries:
            await self._store.txn({}, [Delete(entry.key) for entry in entries])


def _run_key(name: str, number: int) -> str:
    return f"{RUNS}{name}/{number:06d}"


def _verdict_prefix(name: str, run: PipelineRun | None) -> str:
    assert run is not None
    return f"{VERDICTS}{name}/{run.number:06d}/"


def _new_verdicts(before: PipelineRecord, after: PipelineRecord) -> list[tuple[int, GateVerdict]]:
    """Return the verdicts that `after` has and `before` lacks, with their numbers."""
    run = after.active
    if run is None:
        return []
    known, measured = dict[str, GateVerdict](), 0
    if before.active is not None and before.active.number == run.number:
        known, measured = before.active.verdicts, before.active.measured
    new = [v for name, v in run.verdicts.items() if known.get(name) != v]
    return list(enumerate(new, measured + 1)) if run.measured > measured else []


def _readable(entries: Iterable[Entry], kind: type[T]) -> Iterator[T]:
    """Yield the records of rows; a damaged row is logged and left out."""
    for entry in entries:
        try:
            yield decoded(entry.value, kind, entry.key)
        except DamagedRecord as e:
            log.warning("a row of a history was left out", extra={"reason": str(e)})


def encoded(record: msgspec.Struct) -> bytes:
    """Return the stored form of a record, compressed if it is long, as of 10,000 hosts."""
    return packed(msgspec.json.encode(record))


def decoded(data: bytes, kind: type[T], key: str) -> T:
    """Return a stored record. Raises `DamagedRecord`, or `ConfigError` for a newer schema."""
    try:
        data = unpacked(data)
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema <= SCHEMA:
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, zlib.error) as e:
        raise DamagedRecord(
            f"cannot read {key}: the stored record is damaged: {e}", hint=_repair_hint(key)
        ) from e
    raise ConfigError(
        f"cannot read {key}: schema {schema} is newer than {SCHEMA}",
        hint="run the release that wrote it, or restore the store's last backup",
    )


def _repair_hint(key: str) -> str:
    if not key.startswith(PIPELINES):
        return "restore the last backup"
    name = key.removeprefix(PIPELINES)
    return f"restore the last backup, or remove it: twinectl pipeline remove {name} --yes"
