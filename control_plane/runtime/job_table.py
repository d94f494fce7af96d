"""The table of jobs: each a record in memory, stored as an intent and chunks of tasks.

A change writes the chunks in which it differs, and the intent if that differs, in one
transaction. Reports of agents stay in memory. Records of the previous release, with one value per
job, are split when they are read. Each split is one transaction, so a crash leaves the old form or
the new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from control_plane.api.jobs import JobRecord, TaskRecord
from control_plane.api.stored_jobs import (
    JobIntent,
    TaskChunk,
    changed_chunks,
    chunk_numbers,
    chunks_in_turn,
    chunks_of,
    intent_of,
    merged,
    record_of,
    same_intent,
)
from control_plane.runtime.table import Checkpoint, Table, ignore_turns, pages
from control_plane.store import Delete, Entry, KeyChange, Operation, Put, Store
from control_plane.store.outcomes import WriteAttempt
from control_plane.store.quarantine import job_in, quarantined
from control_plane.store.records import JOBS, TASKS, decode, encode, schema_of, task_chunk_key

log = logging.getLogger(__name__)
_CHUNKS_A_TURN = 16
"""Chunks that are decoded in one turn of the loop: some 4,000 tasks."""


class JobTable(Table[JobRecord]):
    """Jobs by name; listeners are called for stored changes, not for reports of agents."""

    def __init__(
        self, store: Store, checkpoint: Checkpoint = ignore_turns, writer: str = ""
    ) -> None:
        """`checkpoint` is that of the runtime, `writer` as in `Table`."""
        super().__init__(store, JOBS, JobRecord, "job", checkpoint=checkpoint, writer=writer)
        self._chunks: dict[str, dict[int, int]] = {}
        """Job → number of each of its chunks → the revision that wrote it last."""
        self._intents: dict[str, int] = {}
        self._pending: dict[str, dict[int | None, KeyChange]] = {}
        """Job → its parts in a transaction of another process, until all parts have arrived."""
        self._compared: tuple[JobRecord | None, JobRecord | None, set[int]] = (None, None, set())
        """Cache: the two records compared last, and the chunks in which they differ."""

    async def load(self) -> None:
        """Read everything, and split records of the previous release."""
        names = await quarantined(self.store)
        self.set_aside = frozenset(filter(None, map(job_in, names)))
        chunks = await self._load_chunks()
        old: list[Entry] = []
        async for page in pages(self.store, self.prefix):
            records: dict[str, JobRecord] = {}
            for entry in page:
                name = entry.key.removeprefix(self.prefix)
                if schema_of(entry.value, entry.key) == 1:
                    old.append(entry)
                    continue
                intent = decode(entry.value, JobIntent, entry.key)
                records[name] = record_of(intent, chunks.pop(name, ()))
                self._set_revisions(name, entry.revision, self._chunks.get(name, {}))
            self._add_loaded(records)
            await asyncio.sleep(0)
        for entry in old:
            name = entry.key.removeprefix(self.prefix)
            self._add_loaded({name: await self._split(name, entry)})
        for name in sorted(chunks):
            log.warning("tasks of no job", extra={"job": name})
            del self._chunks[name]
        self._names = None
        self.start_revisions()

    async def _load_chunks(self) -> dict[str, list[TaskChunk]]:
        found: dict[str, list[TaskChunk]] = {}
        read = 0
        async for page in pages(self.store, TASKS):
            for entry in page:
                chunk = decode(entry.value, TaskChunk, entry.key)
                name = entry.key.removeprefix(TASKS).rpartition("/")[0]
                found.setdefault(name, []).append(chunk)
                self._chunks.setdefault(name, {})[chunk.number] = entry.revision
                read += 1
                if read % _CHUNKS_A_TURN == 0:
                    await asyncio.sleep(0)
        return found

    async def _split(self, name: str, entry: Entry) -> JobRecord:
        """Store a record of schema 1 as intent and chunks, all or none of them."""
        record = _upgraded(decode(entry.value, JobRecord, entry.key))
        chunks = chunks_of(record)
        operations: list[Operation] = [Put(entry.key, encode(intent_of(record)))]
        operations += [Put(task_chunk_key(name, n), encode(c)) for n, c in chunks.items()]
        compare = {entry.key: entry.revision} | {task_chunk_key(name, n): 0 for n in chunks}
        revision = await WriteAttempt(self._slots, compare, operations).make_and_confirm()
        self._set_revisions(name, revision, dict.fromkeys(chunks, revision))
        log.info("job split", extra={"job": name, "chunks": len(chunks)})
        return record

    def concerns(self, key: str) -> bool:
        """Return whether a key is of this table."""
        return key.startswith((self.prefix, TASKS))

    async def follow(self, change: KeyChange) -> None:
        """Keep a change of another process until `complete`: a job has several parts."""
        name, number = _part_of_key(change.key)
        if self._deleted.get(name, 0) <= change.revision:
            self._deleted.pop(name, None)
        if self._is_newer(name, number, change):
            self._pending.setdefault(name, {})[number] = change

    async def complete(self) -> None:
        """Apply the parts of jobs that one transaction wrote; a new job is read whole."""
        pending, self._pending = self._pending, {}
        for name, parts in pending.items():
            async with self.lock(name):
                newer = {n: c for n, c in parts.items() if self._is_newer(name, n, c)}
                if newer and not self._merge(name, newer):
                    await self._read_again(name)

    def _merge(self, name: str, parts: Mapping[int | None, KeyChange]) -> bool:
        """Put changed parts into the record in memory; return whether that was possible."""
        known, intent, at = self._records.get(name), parts.get(None), self._intents.get(name, 0)
        if known is None or (intent is not None and intent.value is None):
            return False
        present_intent, chunks = intent_of(known), dict[int, TaskChunk | None]()
        if intent is not None and intent.value is not None:
            present_intent, at = decode(intent.value, JobIntent, intent.key), intent.revision
        if present_intent.spec.disconnect != known.spec.disconnect:
            return False  # chunks of earlier releases depend on it
        revisions = dict(self._chunks.get(name, {}))
        for number, change in parts.items():
            if number is None:
                continue
            if change.value is None:
                chunks[number] = None
                revisions.pop(number, None)
            else:
                chunks[number] = decode(change.value, TaskChunk, change.key)
                revisions[number] = change.revision
        super()._put(name, merged(known, present_intent, chunks), max([at, *revisions.values()]))
        self._set_revisions(name, at, revisions)
        return True

    def _is_newer(self, name: str, number: int | None, change: KeyChange) -> bool:
        if number is None:
            at = self._intents.get(name, 0)
        else:
            at = self._chunks.get(name, {}).get(number, 0)
        return change.revision > max(at, self._deleted.get(name, 0)) and bool(
            at or change.value is not None
        )

    async def list_again(self) -> None:
        """Read every job again, after the history of the store was compacted."""
        names = set(self._records)
        self._pending.clear()
        async for page in pages(self.store, self.prefix):
            names |= {entry.key.removeprefix(self.prefix) for entry in page}
        for name in sorted(names):
            async with self.lock(name):
                await self._read_again(name)
        self._deleted.clear()

    def _add_loaded(self, records: Mapping[str, JobRecord]) -> None:
        self._records.update(records)
        for loaded in self._loaders:
            loaded(records)

    def expect(self, names: Sequence[str]) -> dict[str, int]:
        """Return comparisons that hold while the intents of these jobs do not change."""
        return {self.prefix + name: self._intents.get(name, 0) for name in names}

    async def commit_many(
        self,
        changes: Mapping[str, JobRecord | None],
        compare: Mapping[str, int] | None = None,
        also: Sequence[Operation] = (),
    ) -> None:
        """Store several records in one transaction, all or none; the caller has the locks.

        A record that differs only in reports of agents is kept in memory, without a write.
        """
        stored: dict[str, JobRecord | None] = {}
        for name, record in changes.items():
            known = self._records.get(name)
            if record is not None and known is not None and self._is_stored_equally(known, record):
                self._records[name] = record
            else:
                stored[name] = record
        if stored or compare or also:
            await super().commit_many(stored, compare, also)

    async def _written(
        self, name: str, record: JobRecord | None
    ) -> tuple[dict[str, int], list[Operation]]:
        known, revisions = self._records.get(name), self._chunks.get(name, {})
        compare = self.expect([name])
        if record is None:
            keys = [task_chunk_key(name, number) for number in revisions]
            compare |= {task_chunk_key(name, n): revision for n, revision in revisions.items()}
            return compare, [Delete(self.prefix + name), *map(Delete, keys)]
        changed = self._changed(known, record)
        removed, operations = set(changed), list[Operation]()
        for number, chunk in chunks_in_turn(record, changed) if changed else ():
            if operations:
                await self._checkpoint()  # most jobs have one chunk, which is encoded at once
            removed.discard(number)
            operations.append(Put(task_chunk_key(name, number), encode(chunk)))
        operations += [Delete(task_chunk_key(name, number)) for number in sorted(removed)]
        if known is None or not same_intent(known, record) or removed:
            operations.append(Put(self.prefix + name, encode(intent_of(record))))
        compare |= {task_chunk_key(name, n): revisions.get(n, 0) for n in changed}
        return compare, operations

    def _put(self, name: str, record: JobRecord | None, revision: int) -> None:
        """Apply what a transaction wrote, or what was read again (then all parts are that new)."""
        known = self._records.get(name)
        if record is None:
            self._intents.pop(name, None)
            self._chunks.pop(name, None)
        else:
            changed = self._changed(known, record)
            chunks = self._chunks.setdefault(name, {})
            present = chunk_numbers(record) if changed else changed
            for number in changed:
                if number in present:
                    chunks[number] = revision
                else:
                    chunks.pop(number, None)
            rewritten = known is None or not same_intent(known, record) or not changed <= present
            if rewritten:
                self._intents[name] = revision
        super()._put(name, record, revision)

    async def _read_again(self, name: str) -> None:
        entry = await self.store.get(self.prefix + name)
        listing = await self.store.list_prefix(f"{TASKS}{name}/")
        if entry is None:
            if name in self._records:
                self._put(name, None, 0)
            return
        chunks = [decode(found.value, TaskChunk, found.key) for found in listing.entries]
        revisions = {
            chunk.number: found.revision
            for chunk, found in zip(chunks, listing.entries, strict=True)
        }
        if entry.revision == self._intents.get(name) and revisions == self._chunks.get(name, {}):
            return
        record = record_of(decode(entry.value, JobIntent, entry.key), chunks)
        super()._put(name, record, max([entry.revision, *revisions.values()]))
        self._set_revisions(name, entry.revision, revisions)

    def _is_stored_equally(self, known: JobRecord, record: JobRecord) -> bool:
        """Return whether two records have the same stored form."""
        return same_intent(known, record) and not self._changed(known, record)

    def _changed(self, known: JobRecord | None, record: JobRecord) -> set[int]:
        """Return the chunks in which records differ; a write asks three times for the same pair."""
        before, after, changed = self._compared
        if before is not known or after is not record:
            changed = chunk_numbers(record) if known is None else changed_chunks(known, record)
            self._compared = known, record, changed
        return changed

    def _set_revisions(self, name: str, intent: int, chunks: dict[int, int]) -> None:
        self._intents[name] = intent
        self._chunks[name] = chunks
        self._revisions[name] = max([intent, *chunks.values()])


def _part_of_key(key: str) -> tuple[str, int | None]:
    """Return the job of a key, and the number of its chunk; None: the key of the intent."""
    if not key.startswith(TASKS):
        return key.removeprefix(JOBS), None
    name, _, number = key.removeprefix(TASKS).rpartition("/")
    return name, int(number)


def _upgraded(record: JobRecord) -> JobRecord:
    """Return a record of schema 1 as one of this release: without the reports of agents."""
    tasks = [
        TaskRecord(
            index=task.index,
            version=task.version,
            generation=task.generation,
            phase=task.phase,
            placement=task.placement,
            listed=task.listed,
            since=task.since,
            attempts=task.attempts,
            avoid=task.avoid,
        )
        for task in record.tasks
    ]
    return msgspec.structs.replace(record, schema=2, tasks=tasks)
