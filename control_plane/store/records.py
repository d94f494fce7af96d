"""Keys of the stored records, their encoding, and the check of their schema number."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from agent.errors import ConfigError
from control_plane.api.allocations import AllocationRecord, Decision
from control_plane.api.broker_stores import BrokerStoreNote, BrokerStoreOwner
from control_plane.api.capacity import EntitlementRecord, EntitlementRequest
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import MachineRecord

SCHEMAS: dict[type, int] = {
    MachineRecord: 1,
    EntitlementRecord: 1,
    EntitlementRequest: 1,
    JobRecord: 1,
    AllocationRecord: 1,
    Decision: 1,
    BrokerStoreNote: 1,
    BrokerStoreOwner: 1,
}
"""The newest schema of each kind that this release reads and writes."""

MACHINES = "machines/"
ENTITLEMENTS = "entitlements/"
REQUESTS = "entitlement-requests/"
JOBS = "jobs/"
ALLOCATIONS = "allocations/"
DECISIONS = "decisions/"

T = TypeVar(
    "T",
    MachineRecord,
    EntitlementRecord,
    EntitlementRequest,
    JobRecord,
    AllocationRecord,
    Decision,
    BrokerStoreNote,
    BrokerStoreOwner,
)


class _Schema(msgspec.Struct):
    schema: int


def machine_key(name: str) -> str:
    """Return where a machine is stored."""
    return MACHINES + name


def entitlement_key(name: str) -> str:
    """Return where an entitlement is stored."""
    return ENTITLEMENTS + name


def job_key(name: str) -> str:
    """Return where a job is stored."""
    return JOBS + name


def allocation_key(job: str) -> str:
    """Return where the machines of a job's tasks are stored."""
    return ALLOCATIONS + job


def decision_key(transaction: str) -> str:
    """Return where it is stored that a transaction is committed."""
    return DECISIONS + transaction


def _lean(kind: type) -> Any:
    """Return a copy of a type for writing, which leaves out what has its default.

    All but the schema, which every reader asks for.
    """
    always = object()
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        fixed = field.required or field.name == "schema"
        fields.append((field.name, Any, always if fixed else field.default))
    return msgspec.defstruct(f"Lean{kind.__name__}", fields, omit_defaults=True, gc=False)


_LEAN: dict[type, Any] = {kind: _lean(kind) for kind in (MachineRecord,)}
"""Kinds of which there are so many that a restart feels the size of each, and that have no
default that is made anew. A default is part of their schema: a new one needs a new number."""
_encode = msgspec.json.Encoder().encode


def encode(record: T) -> bytes:
    """Return a record as it is stored."""
    lean = _LEAN.get(type(record))
    return _encode(record if lean is None else lean(*astuple(record)))


def decode(data: bytes, kind: type[T], key: str) -> T:
    """Return a stored record; refuse one that a newer release wrote, rather than guess.

    Unknown fields of the same schema are ignored and missing ones get their defaults.
    """
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema > SCHEMAS[kind]:
            raise ConfigError(
                f"cannot read {key}: schema {schema} is newer than {SCHEMAS[kind]},"
                " the newest that this release knows",
                hint="run the release that wrote it, or restore the store's last backup",
            )
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as e:
        raise ConfigError(
            f"cannot read {key}: the stored record is damaged: {e}",
            hint="restore the store's last backup",
        ) from e


def retired_key(name: str) -> str:
    """Return where the last generation of a removed job is stored, as a decimal number."""
    return "retired/" + name
