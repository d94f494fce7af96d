"""Moves all records of a store to another engine: SQLite to etcd, and back (docs/adr/0158).

The order of writes ensures that at any moment at most one of the two can be opened, and that the
same command continues after a crash at any step:

1. the target is marked as incomplete, and takes numbers above the source's,
2. records are copied: only those that differ, so a second run costs only the reading,
3. both are read again and compared; the target is marked as proved,
4. the source is marked as moved: the commit point,
5. the target's note is removed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from secrets import randbits
from typing import Protocol

from control_plane.store.bounds import VALUE_MAX
from control_plane.store.bulk import entries, write_all
from control_plane.store.copies import REVISIONS_BETWEEN, Numbers
from control_plane.store.moved import MigrationNote, MigrationState
from control_plane.store.protocol import Delete, Operation, Put, Store
from wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Digest:
    """Number, size and hash of a store's records."""

    records: int
    size: int
    """Bytes of all values."""
    sha256: str


class MigrationSource(Protocol):
    """The store that is in use so far; only this process owns it while it is open."""

    name: str

    @property
    def store(self) -> Store:
        """Return the open store."""
        ...

    @property
    def note(self) -> MigrationNote | None:
        """Return the note of a migration."""
        ...

    async def set_note(self, note: MigrationNote) -> None:
        """Write a note durably."""
        ...


class MigrationTarget(MigrationSource, Protocol):
    """The store that is in use after the migration."""

    async def empty(self) -> bool:
        """Return whether it holds no record."""
        ...

    async def begin(self, note: MigrationNote, above: Numbers) -> None:
        """Write durably that records are being copied; revisions continue above `above`."""
        ...

    async def finish(self, above: Numbers) -> None:
        """Remove the note, so that the store can be opened; its epoch continues above `above`."""
        ...


async def migrate(
    source: MigrationSource, target: MigrationTarget, report: Callable[[str], None] = lambda _: None
) -> bool:
    """Move all records, or continue an interrupted move; False: they had been moved before.

    `report` is called with each step after it is on disk. Raises `ConfigError` for a pair of stores
    that cannot be moved, and the errors of the engines: after those the same call continues.
    """
    numbers = Numbers(source.store.epoch(), source.store.revision())
    if source.note is not None:
        if not await _is_last_step_left(source, source.note, target):
            return False
    else:
        await _copy_and_verify(source, target, numbers, report)
    await target.finish(numbers)
    report(f"{target.name} is already the store")
    return True


async def _is_last_step_left(
    source: MigrationSource, source_note: MigrationNote, target: MigrationTarget
) -> bool:
    """Return whether only the last step is left; False if no step is left."""
    target_note = target.note
    if source_note.state is not MigrationState.MOVED:
        raise ConfigError(f"a migration into {source.name} is incomplete: it cannot be a source")
    wanted = (source_note.run, MigrationState.PROVED)
    if target_note is not None and (target_note.run, target_note.state) == wanted:
        return True
    if target_note is None and not await target.empty():
        return False
    raise ConfigError(
        f"the store in {source.name} was moved before, and not into {target.name}",
        hint="the configuration has to name the two stores of that migration",
    )


async def _copy_and_verify(
    source: MigrationSource,
    target: MigrationTarget,
    numbers: Numbers,
    report: Callable[[str], None],
) -> None:
    """Copy all records, read them back, and mark the source as moved."""
    target_note = target.note
    if target_note is None and not await target.empty():
        raise ConfigError(
            f"{target.name} already has a store with records",
            hint="use another [etcd] prefix, or move that store's folder away",
        )
    await _check_sizes(source.store)
    is_continued = target_note is not None and target_note.state is not MigrationState.MOVED
    run = target_note.run if target_note is not None and is_continued else randbits(61) + 1
    above = Numbers(numbers.epoch, numbers.revision + REVISIONS_BETWEEN)
    await target.begin(MigrationNote(run, MigrationState.INCOMING, _now()), above)
    report(f"{target.name} is marked as incomplete")
    copied = await write_all(target.store, _differences(source.store, target.store))
    report(f"{copied} records written or removed")
    expected, read_back = await digest(source.store), await digest(target.store)
    if expected != read_back:
        raise ConfigError(
            f"{target.name} holds {read_back}, not {expected}: the store was not moved",
            hint="does another program write to it? run the same command again",
        )
    await target.set_note(MigrationNote(run, MigrationState.PROVED, _now()))
    total, size, sha256 = expected.records, expected.size, expected.sha256
    report(f"{total} records, {size} bytes read back: equal, {sha256[:16]}")
    await source.set_note(MigrationNote(run, MigrationState.MOVED, _now()))
    report(f"{source.name} is marked as moved")


async def digest(store: Store) -> Digest:
    """Read a store whole and return the digest of its records."""
    records = size = 0
    total = hashlib.sha256()
    async for entry in entries(store):
        records, size = records + 1, size + len(entry.value)
        key = entry.key.encode()
        total.update(b"%d %d " % (len(key), len(entry.value)) + key + entry.value)
    return Digest(records, size, total.hexdigest())


async def _check_sizes(source: Store) -> None:
    """Raise `ConfigError` for records that are too large for some engine."""
    large = [e.key async for e in entries(source) if len(e.value) > VALUE_MAX]
    if large:
        raise ConfigError(
            f"{len(large)} records have more than {VALUE_MAX} bytes, {large[0]} for instance",
            hint="etcd does not accept them: split the entitlement or job of that name first",
        )


async def _differences(source: Store, target: Store) -> AsyncIterator[Operation]:
    """Yield the operations that make the target equal, reading both once in the order of keys."""
    existing = entries(target)
    other = await anext(existing, None)
    async for entry in entries(source):
        while other is not None and other.key < entry.key:
            yield Delete(other.key)
            other = await anext(existing, None)
        if other is None or other.key > entry.key:
            yield Put(entry.key, entry.value)
            continue
        if other.value != entry.value:
            yield Put(entry.key, entry.value)
        other = await anext(existing, None)
    while other is not None:
        yield Delete(other.key)
        other = await anext(existing, None)


def _now() -> int:
    return int(time.time())
