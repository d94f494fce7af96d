"""The map of an application's shards to tasks: owners write it, clients read it (SD3)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count, Name

MAX_SHARDS = 20_000
MAX_REPLICAS = 16
PARTS = 32
"""A map is stored in as many values, each about 90 KiB at its largest."""

TaskIndex = Annotated[int, Meta(ge=0, le=14_999)]
Replicas = Annotated[list[TaskIndex], Meta(max_length=MAX_REPLICAS)]
Shards = Annotated[dict[Name, Replicas], Meta(max_length=MAX_SHARDS)]
"""Shard → indexes of the tasks that serve it, the preferred one first."""


class ShardMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An owner's map of a job's shards; it replaces the map before."""

    shards: Shards


class ShardMapView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's shards; revision 0: the job has no map."""

    job: str
    revision: Count = 0
    shards: Mapping[str, list[int]] = {}


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a job's map, as it is stored."""

    schema: int = 1
    created_at: float
    """Of the job: a later job of the same name has no shards yet."""
    shards: dict[str, list[int]] = {}


def part_of(shard: str) -> int:
    """Return the part that a shard belongs to, the same in every process."""
    return zlib.crc32(shard.encode()) % PARTS


def parts_of(created_at: float, shards: Mapping[str, list[int]]) -> dict[int, ShardPart]:
    """Return the parts of a map by number; those without a shard are left out."""
    found: dict[int, dict[str, list[int]]] = {}
    for shard, tasks in shards.items():
        found.setdefault(part_of(shard), {})[shard] = list(dict.fromkeys(tasks))
    return {n: ShardPart(created_at=created_at, shards=part) for n, part in found.items()}
