"""Differences between two versions of a job, or between an entitlement and a request for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from control_plane.api.jobs import JobRecord, JobSpec

HIDDEN = ("environment", "configuration", "credentials")
"""Fields whose values may be secrets: only the change is shown, not the values."""
_TEXT_MAX = 400


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of a job file; empty: it is not set."""

    field: str
    before: str
    after: str


def versions_of(record: JobRecord) -> dict[int, JobSpec]:
    """Return the specifications that are known, by version."""
    return dict(sorted({**record.specs, record.version: record.spec}.items()))


def choose_versions(known: Mapping[int, JobSpec], old: int, new: int) -> tuple[int, int]:
    """Return the two versions to show: the requested ones, else the newest; 0: none."""
    numbers = sorted(known)
    if new not in known:
        new = numbers[-1]
    if old not in known:
        old = max((number for number in numbers if number < new), default=0)
    return old, new


def changes(old: Any, new: Any) -> list[FieldChange]:
    """Return the fields of two structs that differ, by name; without an old one all are new."""
    before = _flatten(msgspec.to_builtins(old)) if old is not None else {}
    after = _flatten(msgspec.to_builtins(new))
    found = []
    for field in sorted(before.keys() | after.keys()):
        if before.get(field) == after.get(field):
            continue
        shown = [_value_text(field, values.get(field)) for values in (before, after)]
        if any(shown):  # else an empty text replaces none, as in a new entitlement
            found.append(FieldChange(field, *shown))
    return found


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for name, part in value.items():
            found |= _flatten(part, f"{path}.{name}" if path else str(name))
        return found
    return {} if value in (None, {}, []) else {path: value}


def _value_text(field: str, value: Any) -> str:
    if value is None:
        return ""
    if field.partition(".")[0] in HIDDEN:
        return "(not shown)"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"
