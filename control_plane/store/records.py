"""Keys of the stored records, their encoding, and the check of their schema number."""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from control_plane.api.allocations import AllocationRecord, Decision
from control_plane.api.broker_stores import BrokerStoreNote, BrokerStoreOwner
from control_plane.api.capacity import EntitlementRecord, EntitlementRequest
from control_plane.api.clock import ClockAnchor
from control_plane.api.elastic import FreedBy, PromiseCounts, UseHistory
from control_plane.api.imports import ImportDecision, ImportRow
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord
from control_plane.api.maintenance import PlanRecord, WaveRecord
from control_plane.api.operations import EventRow, GoneJobs
from control_plane.api.opportunistic import QueuedWork
from control_plane.api.ownership import EntitlementOwner, EntitlementRelease, RoleProcess
from control_plane.api.people import Grant, Group, Revocation
from control_plane.api.profiles import ProfileRollout, ProfileVersion
from control_plane.api.rebalancing import RebalanceRecord
from control_plane.api.restored import Restored
from control_plane.api.shards import ShardPart
from control_plane.api.stored_jobs import JobIntent, TaskChunk
from control_plane.store.bounds import VALUE_MAX
from wire.errors import ConfigError

MACHINES = "machines/"
ENTITLEMENTS = "entitlements/"
REQUESTS = "entitlement-requests/"
JOBS = "jobs/"
TASKS = "tasks/"
ALLOCATIONS = "allocations/"
DECISIONS = "decisions/"
IMPORTS = "imports/"
IMPORT_DECISIONS = "import-decisions/"
PLANS, WAVES = "maintenance/", "maintenance-waves/"
PROFILES, ROLLOUTS = "profiles/", "profile-rollouts/"
JOB_EVENTS = "job-events/"
GROUPS, OPERATORS = "people/groups/", "people/operators/"
HOST_ADMINS = "people/host-admins/"
REVOKED = "people/revoked/"
SHARDS = "shards/"
REBALANCE = "rebalance/"
USE_HISTORIES, PROMISES, FREED = "elastic/uses/", "elastic/promises/", "elastic/freed/"
WORK = "work/"
"""Only in the store of the opportunistic scheduler."""
OWNERSHIPS = "ownerships/"
RELEASES = "entitlement-releases/"
"""Written by the shard that releases an entitlement; the move deletes it."""
PROCESSES = "processes/"
QUARANTINE = "quarantine/"
"""Damaged records, each under its whole name (`quarantine.py`)."""
USES = "entitlement-uses/"
"""Written with each job that is added to an entitlement: its deletion compares it."""

CLOCK = "clock"
"""The believed date, by boot of a host, for the next process on it. Earlier releases
had one value, of the last boot."""
RESTORED = "restored"
"""One value: the note that the store was restored from a copy. If it is damaged, the start fails:
without it, tasks that the copy does not know would be stopped."""
GONE_JOBS = "gone-jobs"
"""One value: the deleted jobs whose logs are kept."""
RETIRED = "retired/"
"""By job name: what a later job of that name must know (`RetiredJob`)."""

KINDS: dict[str, type[msgspec.Struct]] = {
    MACHINES: MachineRecord,
    ENTITLEMENTS: EntitlementRecord,
    REQUESTS: EntitlementRequest,
    JOBS: JobIntent,
    TASKS: TaskChunk,
    ALLOCATIONS: AllocationRecord,
    DECISIONS: Decision,
    IMPORTS: ImportRow,
    IMPORT_DECISIONS: ImportDecision,
    JOB_EVENTS: EventRow,
    GONE_JOBS: GoneJobs,
    GROUPS: Group,
    OPERATORS: Grant,
    HOST_ADMINS: Grant,
    REVOKED: Revocation,
    CLOCK: ClockAnchor,
    PLANS: PlanRecord,
    WAVES: WaveRecord,
    PROFILES: ProfileVersion,
    ROLLOUTS: ProfileRollout,
    SHARDS: ShardPart,
    OWNERSHIPS: EntitlementOwner,
    RELEASES: EntitlementRelease,
    PROCESSES: RoleProcess,
    REBALANCE: RebalanceRecord,
    USE_HISTORIES: UseHistory,
    PROMISES: PromiseCounts,
    FREED: FreedBy,
    WORK: QueuedWork,
}
"""Prefix → kind of its records; `jobs/` may also hold records of the previous release."""
SCHEMAS: dict[type, int] = {
    **dict.fromkeys((*KINDS.values(), JobRecord, Restored, BrokerStoreNote, BrokerStoreOwner), 1),
    JobIntent: 2,
}
"""The newest schema of each kind that this release reads; it no longer writes `JobRecord`."""

T = TypeVar("T", bound=msgspec.Struct)


class DamagedRecord(ConfigError):
    """A stored record that cannot be used; others may be intact."""


class _Schema(msgspec.Struct):
    schema: int


def task_chunk_key(job: str, number: int) -> str:
    """Return the key of a chunk of a job's tasks."""
    return f"{TASKS}{job}/{number:03d}"


def event_rows(job: str) -> str:
    """Return the prefix of a job's log."""
    return f"{JOB_EVENTS}{job}/"


def event_row_key(job: str, number: int) -> str:
    """Return the key of a row of a job's log."""
    return f"{event_rows(job)}{number:010d}"


def schema_of(data: bytes, key: str) -> int:
    """Return the schema number of a stored record."""
    try:
        return msgspec.json.decode(unpacked(data), type=_Schema).schema
    except (msgspec.DecodeError, zlib.error) as e:
        raise _damaged_record(key, e) from e


def allocation_key(job: str) -> str:
    """Return the key of the machines of a job's tasks."""
    return ALLOCATIONS + job


def decision_key(transaction: str) -> str:
    """Return the key of a transaction's commit decision."""
    return DECISIONS + transaction


def _lean(kind: type) -> Any:
    """Return a copy of a type for writing that omits fields with their default.

    The schema is always written: every reader needs it.
    """
    always = object()
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        fixed = field.required or field.name == "schema"
        fields.append((field.name, Any, always if fixed else field.default))
    return msgspec.defstruct(f"Lean{kind.__name__}", fields, omit_defaults=True, gc=False)


_LEAN: dict[type, Any] = {kind: _lean(kind) for kind in (MachineRecord,)}
"""Kinds with up to a million records: their size affects a restart. Their defaults are not
created on each read. Defaults are part of their schema: a new default needs a new number."""
_PACK_FROM = 64 << 10
_PACKED: dict[type[msgspec.Struct], int] = {
    AllocationRecord: _PACK_FROM,
    RebalanceRecord: _PACK_FROM,
    JobIntent: VALUE_MAX,
}
"""Kinds that grow with a job or a plan, and the bytes from which they are packed. Half a megabyte
at 15,000 tasks or 1,500 moves takes a quarter when packed; a small record would only cost time. An
intent has several copies of its job's specification: earlier releases read it only unpacked."""
_PACK = b"z"
"""First byte of a packed value; JSON begins with a brace."""
_encode = msgspec.json.Encoder().encode


def encode(record: T) -> bytes:
    """Return the stored form of a record."""
    lean = _LEAN.get(type(record))
    data = _encode(record if lean is None else lean(*astuple(record)))
    most = _PACKED.get(type(record))
    return data if most is None else packed(data, most)


def packed(data: bytes, most: int = _PACK_FROM) -> bytes:
    """Return JSON as it is stored: packed (zlib) if it is longer than `most` bytes."""
    return _PACK + zlib.compress(data, 1) if len(data) > most else data


def unpacked(data: bytes) -> bytes:
    """Return the JSON of a stored value; `zlib.error` if it is damaged."""
    return zlib.decompress(data[len(_PACK) :]) if data.startswith(_PACK) else data


def decode(data: bytes, kind: type[T], key: str) -> T:
    """Return a stored record; `ConfigError` if a newer release wrote it.

    Unknown fields of the same schema are ignored and missing ones get their defaults.
    """
    try:
        data = unpacked(data)
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema > SCHEMAS[kind]:
            raise ConfigError(
                f"cannot read {key}: schema {schema} is newer than {SCHEMAS[kind]}, the newest "
                "supported one",
                hint="run the release that wrote it, or restore the store's last backup",
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeError, zlib.error) as e:
        raise _damaged_record(key, e) from e


def _damaged_record(key: str, error: Exception) -> DamagedRecord:
    return DamagedRecord(
        f"cannot read {key}: the stored record is damaged: {error}",
        hint="`twine-control-plane check-store` lists damaged records; or restore the "
        "store's last backup",
    )


def retired_key(name: str) -> str:
    """Return the key of what a later job of this name must know (`RetiredJob`)."""
    return RETIRED + name
