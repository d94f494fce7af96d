"""JSON that is decoded in parts: a decoder holds Python's GIL until it has ended.

A long document is first split into the text of its lists' items and of its nested objects, at
1 GB a second. Decoding them takes 25 times as long, and other requests run in between.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, structs

LONG_BYTES = 256 << 10
"""A shorter document is decoded at once: about 5 ms."""
_PART_BYTES = 64 << 10
"""Bytes that are decoded before other tasks of the loop run: about 1 ms."""


async def decode_in_parts(data: bytes | Raw, kind: Any) -> Any:
    """Return a JSON document as `kind`; raises as `msgspec.json.decode` does."""
    if len(data) < LONG_BYTES:
        return msgspec.json.decode(data, type=kind)
    if get_origin(kind) is list:
        return await _decode_items(msgspec.json.decode(data, type=list[Raw]), *get_args(kind))
    outline = _outline_of(kind)
    if outline is None:
        return msgspec.json.decode(data, type=kind)
    split = msgspec.json.decode(data, type=outline)
    await asyncio.sleep(0)
    given: dict[str, Any] = {}
    for field in structs.fields(kind):
        value = getattr(split, field.name)
        if get_origin(field.type) is list and value is not UNSET:
            value = await _decode_items(value, *get_args(field.type))
        elif isinstance(value, Raw):
            value = await decode_in_parts(value, field.type)
        if value is not UNSET:
            given[field.name] = value
    return kind(**given)


async def _decode_items(raw: list[Raw], kind: Any) -> list[Any]:
    items, size = [], 0
    for item in raw:
        items.append(await decode_in_parts(item, kind))
        size += len(item)
        if size >= _PART_BYTES:
            size = 0
            await asyncio.sleep(0)
    return items


@cache
def _outline_of(kind: Any) -> Any:
    """Return a type with the text of the items and objects of `kind`; None: it has no parts."""
    if not _is_struct(kind):
        return None
    how = kind.__struct_config__
    if how.tag is not None or how.array_like or how.forbid_unknown_fields:
        return None
    fields: list[tuple[str, Any, Any]] = []
    for field in structs.fields(kind):
        split = field.type
        if get_origin(split) is list:
            split = list[Raw]
        elif _is_struct(split):
            split = Raw
        default = msgspec.NODEFAULT if field.required else UNSET
        fields.append((field.name, split if field.required else split | msgspec.UnsetType, default))
    names = {field.name: field.encode_name for field in structs.fields(kind)}
    return msgspec.defstruct(f"{kind.__name__}Outline", fields, kw_only=True, rename=names)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
