"""Stores the state of autoscaled jobs in the autoscaler's own store: at most 14 KB for each job."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec

from control_plane.api.sizings import Recommendation
from control_plane.autoscaler.core.history import LoadHistory
from control_plane.autoscaler.core.recommendation import JobSizing, SizingState
from control_plane.store import Delete, Operation, Put, Store
from control_plane.store.bounds import ROWS_MAX

log = logging.getLogger(__name__)
PREFIX = "sizings/"
SCHEMA = 1
PAGE = 1000


class StoredSizing(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of one job."""

    schema: int = SCHEMA
    history: bytes
    """`LoadHistory.to_bytes`."""
    state: SizingState = SizingState()
    signal: str = ""
    """Signal and query of the history; if they change, a new history begins."""
    seen_at: float = 0.0
    """When the job was last listed."""
    last: Recommendation | None = None
    """The last recommendation, which users see until the next evaluation."""


class AutoscaledJob(msgspec.Struct, kw_only=True):
    """The state of one autoscaled job in memory; fields as in `StoredSizing`."""

    sizing: JobSizing = msgspec.field(default_factory=JobSizing)
    signal: str = ""
    seen_at: float = 0.0
    last: Recommendation | None = None


async def load(store: Store) -> dict[str, AutoscaledJob]:
    """Return the stored jobs. A value that cannot be read is left out: its history begins again."""
    jobs, after = dict[str, AutoscaledJob](), ""
    while True:
        entries = (await store.list_prefix(PREFIX, after, PAGE)).entries
        for entry in entries:
            job, after = entry.key.removeprefix(PREFIX), entry.key
            try:
                jobs[job] = _decoded(entry.value)
            except (msgspec.DecodeError, ValueError) as e:
                extra = {"job": job, "reason": str(e)}
                log.warning("stored history is damaged or newer; a new history begins", extra=extra)
        if len(entries) < PAGE:
            return jobs


def _decoded(data: bytes) -> AutoscaledJob:
    stored = msgspec.msgpack.decode(data, type=StoredSizing)
    if stored.schema > SCHEMA:
        raise ValueError(f"schema {stored.schema} is newer than {SCHEMA}")
    sizing = JobSizing(LoadHistory.from_bytes(stored.history), stored.state)
    return AutoscaledJob(
        sizing=sizing, signal=stored.signal, seen_at=stored.seen_at, last=stored.last
    )


async def save(
    store: Store, changed: Mapping[str, AutoscaledJob], deleted: Iterable[str] = ()
) -> None:
    """Store jobs and delete others, in several transactions. This process is the only writer."""
    operations: list[Operation] = [Put(PREFIX + n, encoded(job)) for n, job in changed.items()]
    operations += [Delete(PREFIX + name) for name in deleted]
    for first in range(0, len(operations), ROWS_MAX):
        await store.txn({}, operations[first : first + ROWS_MAX])


def encoded(job: AutoscaledJob) -> bytes:
    """Return the stored form of a job."""
    stored = StoredSizing(
        history=job.sizing.history.to_bytes(),
        state=job.sizing.state,
        signal=job.signal,
        seen_at=job.seen_at,
        last=job.last,
    )
    return msgspec.msgpack.encode(stored)
