"""Everything that is wrong with a document at once, where a decoder stops at the first error.

The decoder stays the only judge: a value is asked for as the type it should have, and only
where it is refused are its parts asked for one by one. What no part explains is the error of
the whole. So every constraint is written once, in the type.
"""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta

from agent.errors import FieldError

MAX_ERRORS = 100
MAX_DEPTH = 32


def violations(value: Any, kind: Any, where: str = "", depth: int = 0) -> list[FieldError]:
    """Return what keeps `value` (plain values, as JSON, TOML or YAML give) from being `kind`."""
    reason = _refusal(value, kind)
    if reason is None:
        return []
    if depth >= MAX_DEPTH:
        return [FieldError(field=where or "(whole)", reason="nested too deeply")]
    inner: list[FieldError] = []
    bare, constraints = _strip(kind)
    bare = _arm(value, bare)
    if isinstance(value, dict) and _is_struct(bare):
        inner = _in_struct(value, bare, where, depth)
    elif isinstance(value, dict) and get_origin(bare) is dict:
        inner = _in_dict(value, bare, constraints, where, depth)
    elif isinstance(value, list) and get_origin(bare) is list:
        inner = _in_list(value, bare, constraints, where, depth)
    if not inner:
        return [FieldError(field=where or "(whole)", reason=_in_words(reason, constraints))]
    return inner[:MAX_ERRORS]


def _in_struct(value: dict[Any, Any], kind: Any, where: str, depth: int) -> list[FieldError]:
    found: list[FieldError] = []
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields and kind.__struct_config__.forbid_unknown_fields:
            known = ", ".join(fields)
            found.append(FieldError(field=_join(where, key), reason=f"unknown; known: {known}"))
    for name, field in fields.items():
        if name in value:
            found += violations(value[name], field.type, _join(where, name), depth + 1)
        elif field.required:
            found.append(FieldError(field=_join(where, name), reason="missing"))
    return found


def _in_dict(
    value: dict[Any, Any], kind: Any, constraints: list[Meta], where: str, depth: int
) -> list[FieldError]:
    key_kind, item_kind = get_args(kind)
    found = _whole(value, dict[Any, Any], constraints, where)
    for key, item in value.items():
        place = _join(where, key)
        if reason := _refusal(key, key_kind):
            reason = _in_words(reason, _strip(key_kind)[1])
            found.append(FieldError(field=place, reason=f"as a name: {reason}"))
        found += violations(item, item_kind, place, depth + 1)
    return found


def _in_list(
    value: list[Any], kind: Any, constraints: list[Meta], where: str, depth: int
) -> list[FieldError]:
    found = _whole(value, list[Any], constraints, where)
    (item_kind,) = get_args(kind)
    for index, item in enumerate(value):
        found += violations(item, item_kind, f"{where}[{index}]", depth + 1)
        if len(found) > MAX_ERRORS:
            break
    return found


def _whole(value: Any, kind: Any, constraints: list[Meta], where: str) -> list[FieldError]:
    """Return the error of a container's own constraints, its length for instance."""
    if not constraints:
        return []
    reason = _refusal(value, typing.Annotated[kind, *constraints])
    return [FieldError(field=where or "(whole)", reason=reason)] if reason else []


def _refusal(value: Any, kind: Any) -> str | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        return str(e).partition(" - at `")[0]
    except RecursionError:
        return "nested too deeply"
    return None


def _in_words(reason: str, constraints: list[Meta]) -> str:
    """Return a reason without its regular expression, where the type says it in words."""
    words = next((m.description for m in constraints if m.description), None)
    return f"Expected {words}" if words and "matching regex" in reason else reason


def _strip(kind: Any) -> tuple[Any, list[Meta]]:
    """Return a type without its annotations, and the constraints among these."""
    constraints: list[Meta] = []
    while get_origin(kind) is typing.Annotated:
        inner, *extra = get_args(kind)
        constraints += [m for m in extra if isinstance(m, Meta)]
        kind = inner
    return kind, constraints


def _arm(value: Any, kind: Any) -> Any:
    """Return the arm of a union that a container was meant for; other types unchanged."""
    if get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    for arm in get_args(kind):
        bare, _ = _strip(arm)
        if isinstance(value, dict) and (_is_struct(bare) or get_origin(bare) is dict):
            return bare
        if isinstance(value, list) and get_origin(bare) is list:
            return bare
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
