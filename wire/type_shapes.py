"""Inspects types of the wire: their constraints and the members of unions."""

from __future__ import annotations

import types
import typing
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta


def without_annotations(kind: Any) -> tuple[Any, list[Meta]]:
    """Return a type without its annotations, and the constraints among these."""
    constraints: list[Meta] = []
    while get_origin(kind) is typing.Annotated:
        inner, *extra = get_args(kind)
        constraints += [m for m in extra if isinstance(m, Meta)]
        kind = inner
    return kind, constraints


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    bare, _ = without_annotations(kind)
    return get_args(bare) if get_origin(bare) in (typing.Union, types.UnionType) else (kind,)


def union_member(value: Any, kind: Any) -> Any:
    """Return the member of a union that a container was meant for; other types unchanged.

    Among tagged structs it is the one whose tag the value has.
    """
    bare = [without_annotations(one)[0] for one in union_members(kind)]
    fitting = [one for one in bare if _accepts_container(value, one)]
    tagged = [one for one in fitting if is_struct(one) and _has_tag_of(value, one)]
    return (tagged or fitting or [kind])[0]


def is_struct(kind: Any) -> bool:
    """Return whether a type is one of our structs."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def is_number(kind: Any) -> bool:
    """Return whether a value of a type is a number and no text."""
    bare = [without_annotations(one)[0] for one in union_members(kind)]
    return any(one in (int, float) for one in bare) and str not in bare


def _accepts_container(value: Any, kind: Any) -> bool:
    if isinstance(value, dict):
        return is_struct(kind) or get_origin(kind) is dict
    return isinstance(value, list) and get_origin(kind) is list


def _has_tag_of(value: Any, kind: Any) -> bool:
    config = kind.__struct_config__
    return config.tag_field is not None and value.get(config.tag_field) == config.tag
