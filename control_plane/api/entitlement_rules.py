"""Contradictions between fields of an entitlement, for command line and front end.

The type of a field bounds its value. `portal.core.entitlement_check` checks what depends on the
region: its machine types, other entitlements.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

from agent.api import Relaxation
from agent.api.relaxations import TO_BE_ALLOWED
from control_plane.api.validate import preference_errors, requirement_errors
from wire.errors import FieldError
from wire.units import shown
from wire.violations import name_shown

_UNIT_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,62}")
MAX_DEPTH = 10
MAX_LISTED = 20
_NAMED = ("prefer", "avoid")


def entitlement_relations(document: Any, where: str = "") -> list[FieldError]:
    """Return the contradictions between fields of an `EntitlementSpec`, as plain values."""
    if not isinstance(document, dict):
        return []
    found = [*_quota_errors(document), *_unit_errors(document), *_value_errors(document)]
    found += _relaxation_errors(document)
    found += requirement_errors(document.get("requires"))
    found += preference_errors(document.get("preferences"))
    return [FieldError(field=where + e.field, reason=e.reason) for e in found]


def change_relations(document: Any) -> list[FieldError]:
    """Return the contradictions between fields of an `EntitlementChange`."""
    if not isinstance(document, dict):
        return []
    return entitlement_relations(document.get("spec"), "spec.")


def _relaxation_errors(document: dict[Any, Any]) -> list[FieldError]:
    """Return an error for relaxations that need no permission."""
    listed = document.get("relaxations")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    not_needed = [name for name in Relaxation if name not in TO_BE_ALLOWED and name in names]
    if not not_needed:
        return []
    how = "raw requires the role host-admin" if "raw" in not_needed else "every job may have these"
    named, can = [_listed([str(name) for name in names]) for names in (not_needed, TO_BE_ALLOWED)]
    reason = f"{named} cannot be allowed here: {how}; allowed are {can}"
    return [_error("relaxations", reason)]


def _quota_errors(document: dict[Any, Any]) -> list[FieldError]:
    machines, rru = document.get("machines"), document.get("rru")
    per_type, types = document.get("per_type", {}), document.get("machine_types", [])
    if machines is None and rru is None and not per_type:
        return [_error("machines", "a quota is missing: machines, per_type, or rru")]
    if not isinstance(per_type, dict) or not isinstance(types, list):
        return []
    found = _borrow_errors(document)
    known = {t for t in types if isinstance(t, str)}
    if types and (unknown := sorted({str(t) for t in per_type} - known)):
        reason = f"{_listed(unknown)} is not one of machine_types ({_listed(sorted(known))})"
        found.append(_error("per_type", reason))
    counts = [count for count in per_type.values() if _is_count(count)]
    most = sum(counts)
    if per_type and len(counts) == len(per_type) and _is_count(machines) and machines > most:
        found.append(_error("machines", f"{machines} exceeds {most}, the sum of per_type"))
    return found


def _borrow_errors(document: dict[Any, Any]) -> list[FieldError]:
    """Return errors of a quota of 0 without loans, and of loans of a reservation."""
    elastic = document.get("elastic")
    borrow = elastic.get("borrow", 0) if isinstance(elastic, dict) else 0
    if document.get("machines") == 0 and borrow == 0:
        reason = "a quota of 0 is for entitlements that borrow machines: elastic.borrow"
        return [_error("machines", reason)]
    if elastic is not None and document.get("materialization") is not None:
        reason = "a reservation has no machines to lend or borrow: set it on the entitlement below"
        return [_error("elastic", reason)]
    return []


def _listed(names: list[str]) -> str:
    return ", ".join(name_shown(name) for name in names[:MAX_LISTED]) + (
        ", …" if len(names) > MAX_LISTED else ""
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _unit_errors(document: dict[Any, Any]) -> list[FieldError]:
    unit = document.get("business_unit", "")
    if not isinstance(unit, str) or not unit:
        return []
    parts = unit.split("/")
    if len(parts) > MAX_DEPTH:
        return [_error("business_unit", f"{len(parts)} levels exceed the maximum of {MAX_DEPTH}")]
    if all(_UNIT_PART.fullmatch(part) for part in parts):
        return []
    return [
        _error(
            "business_unit",
            f"{shown(unit)} is not a path such as ads/ranking: parts of letters, digits, space, "
            ". _ - between single slashes",
        )
    ]


def _value_errors(document: dict[Any, Any]) -> list[FieldError]:
    listed = document.get("preferences")
    if not isinstance(listed, list):
        return []
    found = []
    for i, preference in enumerate(listed[:MAX_LISTED]):  # a longer list is refused for its length
        if isinstance(preference, dict):
            strategy, values = preference.get("strategy"), preference.get("values", [])
            named = isinstance(strategy, str) and strategy in _NAMED
            if named and values == []:
                found.append(_error(f"preferences[{i}].values", f"{strategy} needs values"))
            elif not named and isinstance(values, list) and values:
                found.append(_error(f"preferences[{i}].values", "only for prefer and avoid"))
    return found


def _error(field: str, reason: str) -> FieldError:
    return FieldError(field=field, reason=reason)
