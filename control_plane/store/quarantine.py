"""Damaged stored records: set aside under a name, reported until an operator acts.

A damaged record never keeps the control plane from starting. It stays unchanged in the store
below `quarantine/`; only `twine-control-plane check-store` reads it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.api.stored_jobs import JobIntent
from control_plane.store.bulk import entries
from control_plane.store.protocol import Delete, Entry, Operation, Put, Store
from control_plane.store.records import (
    JOBS,
    KINDS,
    QUARANTINE,
    TASKS,
    DamagedRecord,
    decode,
    schema_of,
)
from wire.errors import ConfigError, NotFound

log = logging.getLogger(__name__)
_REPEATED = ("facts", "hardware")
"""Fields of a machine's record that repeat other sources: the record is usable without them."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A record that cannot be used."""

    entry: Entry
    reason: str
    usable_part: bytes | None = None
    """Replaces the record; None: no part of it is usable."""

    @property
    def key(self) -> str:
        """Return its name in the store."""
        return self.entry.key


async def damages(store: Store) -> list[Damage]:
    """Return every damaged record; reads everything, and changes nothing.

    `ConfigError` for a record of a newer release: that is not damage.
    """
    found: list[Damage] = []
    for prefix, kind in KINDS.items():
        async for entry in entries(store, prefix):
            if (damage := _damage(entry, kind)) is not None:
                found.append(damage)
    return found


async def set_aside(store: Store, damage: Damage) -> None:
    """Move a record to `quarantine/`; its usable part replaces it."""
    aside, part = QUARANTINE + damage.key, damage.usable_part
    known = await store.get(aside)
    operations: list[Operation] = [Put(aside, damage.entry.value)]
    operations.append(Delete(damage.key) if part is None else Put(damage.key, part))
    compare = {damage.key: damage.entry.revision, aside: 0 if known is None else known.revision}
    await store.txn(compare, operations)
    fields = {"record": damage.key, "reason": damage.reason, "used": part is not None}
    log.error("a stored record is damaged and was set aside", extra=fields)


async def set_all_aside(store: Store) -> list[Damage]:
    """Set all damaged records aside, with the other records of their jobs, and return them."""
    found = await damages(store)
    done = {damage.key for damage in found}
    for damage in found:
        await set_aside(store, damage)
    for job in sorted({job_in(damage.key) for damage in found} - {""}):
        for entry in await _records_of_job(store, job):
            if entry.key not in done:
                sibling = Damage(entry, f"another record of job {job} is damaged")
                await set_aside(store, sibling)
                found.append(sibling)
    return found


async def quarantined(store: Store) -> list[str]:
    """Return the names of all records that were set aside."""
    return [entry.key.removeprefix(QUARANTINE) async for entry in entries(store, QUARANTINE)]


async def set_aside_by_name(store: Store, name: str) -> Damage:
    """Set the record aside that an operator names, damaged or not."""
    entry = await store.get(name)
    if entry is None:
        raise NotFound(f"there is no record {name!r}", hint="twine-control-plane check-store")
    kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
    if kind is None:
        known = ", ".join(KINDS)
        raise NotFound(
            f"{name!r} is not a record that can be set aside", hint=f"those below {known}"
        )
    damage = _damage(entry, kind) or Damage(entry, "set aside by hand")
    await set_aside(store, damage)
    return damage


async def forget(store: Store, name: str) -> None:
    """Delete a record that was set aside, for good."""
    entry = await store.get(QUARANTINE + name)
    if entry is None:
        raise NotFound(f"record {name!r} is not set aside", hint="twine-control-plane check-store")
    await store.txn({entry.key: entry.revision}, [Delete(entry.key)])


def job_in(name: str) -> str:
    """Return the job that a record belongs to; empty: none."""
    for prefix in (JOBS, TASKS):
        if name.startswith(prefix):
            return name.removeprefix(prefix).partition("/")[0]
    return ""


async def _records_of_job(store: Store, job: str) -> list[Entry]:
    """Return all records of a job: it is used as a whole or not at all."""
    intent = await store.get(JOBS + job)
    chunks = [entry async for entry in entries(store, f"{TASKS}{job}/")]
    return chunks if intent is None else [intent, *chunks]


def _damage(entry: Entry, kind: type[msgspec.Struct]) -> Damage | None:
    try:
        if kind is JobIntent and schema_of(entry.value, entry.key) == 1:
            kind = JobRecord
        decode(entry.value, kind, entry.key)
    except DamagedRecord as e:
        part = _usable_part(entry) if kind is MachineRecord else None
        return Damage(entry, str(e), part)
    return None


def _usable_part(entry: Entry) -> bytes | None:
    """Return a machine's record without its repeated fields; None if that is damaged, too."""
    try:
        fields = msgspec.json.decode(entry.value, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None
    rest = msgspec.json.encode({k: v for k, v in fields.items() if k not in _REPEATED})
    try:
        decode(rest, MachineRecord, entry.key)
    except ConfigError:
        return None
    return rest
