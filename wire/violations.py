"""Everything that is wrong with a document at once, where a decoder stops at the first error.

The decoder stays the only judge: a value is asked for as the type it should have, and only
where it is refused are its parts asked for one by one. What no part explains is the error of
the whole. So every constraint is written once, in the type.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta

from wire.errors import FieldError
from wire.type_shapes import arm, is_struct, strip
from wire.type_text import refusal

MAX_ERRORS = 100
MAX_DEPTH = 32


def violations(value: Any, kind: Any, where: str = "", depth: int = 0) -> list[FieldError]:
    """Return what keeps `value` (plain values, as JSON, TOML or YAML give) from being `kind`."""
    if not _is_refused(value, kind):
        return []
    if depth >= MAX_DEPTH:
        return [FieldError(field=where or "(whole)", reason="nested too deeply")]
    inner: list[FieldError] = []
    bare, constraints = strip(kind)
    bare = arm(value, bare)
    if isinstance(value, dict) and is_struct(bare):
        inner = _in_struct(value, bare, where, depth)
    elif isinstance(value, dict) and get_origin(bare) is dict:
        inner = _in_dict(value, bare, constraints, where, depth)
    elif isinstance(value, list) and get_origin(bare) is list:
        inner = _in_list(value, bare, constraints, where, depth)
    if not inner:
        reason = _of_parts(value, bare) or refusal(value, kind, _last(where))
        return [FieldError(field=where or "(whole)", reason=reason)]
    return inner[:MAX_ERRORS]


def _in_struct(value: dict[Any, Any], kind: Any, where: str, depth: int) -> list[FieldError]:
    found: list[FieldError] = []
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields and kind.__struct_config__.forbid_unknown_fields:
            found.append(FieldError(field=_join(where, key), reason=_unknown(str(key), fields)))
    for name, field in fields.items():
        if name in value:
            found += violations(value[name], field.type, _join(where, name), depth + 1)
        elif field.required:
            found.append(FieldError(field=_join(where, name), reason="missing"))
    return found


def _unknown(key: str, fields: Iterable[str]) -> str:
    """Return that a name is unknown, with the one that was probably meant, else with all."""
    import difflib  # rare, and an agent lives for months

    if meant := difflib.get_close_matches(key[:80], fields, n=1, cutoff=0.75):
        return f"unknown; did you mean {meant[0]}?"
    return f"unknown; known: {', '.join(fields)}"


def _in_dict(
    value: dict[Any, Any], kind: Any, constraints: list[Meta], where: str, depth: int
) -> list[FieldError]:
    key_kind, item_kind = get_args(kind)
    found = _whole(value, dict[Any, Any], constraints, where)
    for key, item in value.items():
        place = _join(where, key)
        if _is_refused(key, key_kind):
            reason = refusal(key, key_kind, "")
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
    whole = typing.Annotated[kind, *constraints]
    if not _is_refused(value, whole):
        return []
    return [FieldError(field=where or "(whole)", reason=refusal(value, whole, ""))]


def _is_refused(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeError):
        return True
    return False


def _of_parts(value: Any, kind: Any) -> str:
    """Return what a table says of its own parts (`__post_init__`), each of which is right."""
    if not isinstance(value, dict) or not is_struct(kind):
        return ""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        return str(e) if isinstance(e.__cause__, ValueError) else ""
    return ""


def _join(where: str, key: Any) -> str:
    name = str(key).encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair
    return f"{where}.{name}" if where else name


def _last(where: str) -> str:
    """Return the name of the field that a place lies in: `probe.ports[2]` is in `ports`."""
    return where.rpartition(".")[2].partition("[")[0]
