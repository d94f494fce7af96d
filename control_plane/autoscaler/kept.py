"""What the autoscaler stores: one value of at most 14 KB for each job, in a store of its own."""

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
    """What the history measures: signal and query; if they change it begins again."""
    seen_at: float = 0.0
    """When the job was last listed."""
    last: Recommendation | None = None
    """Shown to users until the next evaluation."""


class KeptJob(msgspec.Struct, kw_only=True):
    """One job in memory."""

    sizing: JobSizing = msgspec.field(default_factory=JobSizing)
    signal: str = ""
    seen_at: float = 0.0
    last: Recommendation | None = None


async def load(store: Store) -> dict[str, KeptJob]:
    """Return the stored jobs. A value that cannot be read is left out: its job begins again."""
    found, after = dict[str, KeptJob](), ""
    while True:
        entries = (await store.list_prefix(PREFIX, after, PAGE)).entries
        for entry in entries:
            job, after = entry.key.removeprefix(PREFIX), entry.key
            try:
                found[job] = _kept(entry.value)
            except (msgspec.DecodeError, ValueError) as e:
                extra = {"job": job, "reason": str(e)}
                log.warning("stored history is damaged or newer; a new history begins", extra=extra)
        if len(entries) < PAGE:
            return found


def _kept(data: bytes) -> KeptJob:
    stored = msgspec.msgpack.decode(data, type=StoredSizing)
    if stored.schema > SCHEMA:
        raise ValueError(f"schema {stored.schema} is newer than {SCHEMA}")
    sizing = JobSizing(LoadHistory.from_bytes(stored.history), stored.state)
    return KeptJob(sizing=sizing, signal=stored.signal, seen_at=stored.seen_at, last=stored.last)


async def save(store: Store, changed: Mapping[str, KeptJob], gone: Iterable[str] = ()) -> None:
    """Store jobs, and drop others, in several transactions. This process is the only writer."""
    operations: list[Operation] = [Put(PREFIX + j, encoded(kept)) for j, kept in changed.items()]
    operations += [Delete(PREFIX + job) for job in gone]
    for first in range(0, len(operations), ROWS_MAX):
        await store.txn({}, operations[first : first + ROWS_MAX])


def encoded(kept: KeptJob) -> bytes:
    """Return a job as it is stored."""
    stored = StoredSizing(
        history=kept.sizing.history.to_bytes(),
        state=kept.sizing.state,
        signal=kept.signal,
        seen_at=kept.seen_at,
        last=kept.last,
    )
    return msgspec.msgpack.encode(stored)
