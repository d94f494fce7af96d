"""JSON that is encoded in parts: an encoder holds Python's GIL until it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
from msgspec import structs

PART = 200
"""Most items of a list that are encoded in one call: 200 tasks take 0.3 ms."""
_FEW = 50
"""Most items of a list or mapping in a value that is encoded in one call."""
_PART_BYTES = 32 << 10
"""Bytes of a part at which the next one has as many items: about 0.1 ms."""
_PLAIN = frozenset({str, int, float, bool, bytes, NoneType})
Hook = Callable[[Any], Any]


def has_many(value: Any) -> bool:
    """Return whether a value has a long list or mapping, at any depth.

    In a struct only those of structs count: a list of names is short to encode.
    """
    if isinstance(value, msgspec.Struct):
        return any(has_many(getattr(value, name)) for name in long_fields(type(value)))
    if isinstance(value, dict):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    else:
        return False
    return len(value) > _FEW or any(type(one) not in _PLAIN and has_many(one) for one in inside)


@cache
def long_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the fields of a type that may have a long list or mapping of structs."""
    return tuple(f.name for f in structs.fields(kind) if _may_be_long(f.type, frozenset({kind})))


def _may_be_long(kind: Any, outer: frozenset[type], *, is_short: bool = False) -> bool:
    """Return whether values of a type may have many structs; `outer` are the types around it.

    `is_short`: a limit of the type keeps lists and mappings short, so only their items count.
    """
    if _is_plain(kind):
        return False
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inside = outer | {kind}
        return kind in outer or any(
            _may_be_long(field.type, inside) for field in structs.fields(kind)
        )
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _may_be_long(parts[0], outer, is_short=any(map(_is_limit, parts[1:])))
    if origin in (Union, UnionType) or (is_short and parts):
        return any(_may_be_long(part, outer) for part in parts)
    return not parts or not all(map(_is_plain, parts))


def _is_limit(note: Any) -> bool:
    """Return whether an annotation of a list or mapping keeps it short."""
    return isinstance(note, msgspec.Meta) and (note.max_length or _FEW + 1) <= _FEW


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        return _is_plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_plain, get_args(kind)))
    return kind in _PLAIN or (isinstance(kind, type) and issubclass(kind, Enum))


def json_parts(value: Any, hook: Hook | None = None) -> Iterator[bytes]:
    """Yield a value as JSON in parts, small enough to take about a millisecond each.

    `hook` encodes values of unknown types.
    """
    if not has_many(value):
        yield msgspec.json.encode(value, enc_hook=hook)
    elif isinstance(value, list):
        yield from _list_parts(value, hook)
    elif (fields := _encoded_fields(value)) is not None:
        for number, (name, item) in enumerate(fields):
            yield (b"," if number else b"{") + msgspec.json.encode(name) + b":"
            yield from json_parts(item, hook)
        yield b"}"
    else:
        yield msgspec.json.encode(value, enc_hook=hook)


def _list_parts(items: list[Any], hook: Hook | None) -> Iterator[bytes]:
    """Yield a list with items. The size of a part follows from the bytes of the one before it:
    to look into each item would take longer than to encode it.
    """
    first, count = 0, 1
    while first < len(items):
        yield b"," if first else b"["
        if has_many(items[first]):
            yield from json_parts(items[first], hook)
            first += 1
            continue
        last = min(first + count, len(items))
        part = msgspec.json.encode(items[first:last], enc_hook=hook)[1:-1]
        yield part
        count = max(1, min(PART, 2 * count, (last - first) * _PART_BYTES // max(1, len(part))))
        first = last
    yield b"]"


def _encoded_fields(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the fields of a value that is encoded field by field; None: it is encoded whole."""
    if isinstance(value, dict):
        return value.items() if value and all(type(name) is str for name in value) else None
    if not isinstance(value, msgspec.Struct):
        return None
    how = value.__struct_config__
    if how.omit_defaults or how.tag is not None or how.array_like or not value.__struct_fields__:
        return None
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    return ((encoded, getattr(value, name)) for encoded, name in names)
