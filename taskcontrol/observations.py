"""Queries of controllers to the application: its leader, its shard map, its load.

All queries have limits of time and size. A failed query has a defined result: no leader, the last
shard map, a load of 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec

from wire.errors import ConfigError, TwineError, Unreachable

ANSWER_MAX_BYTES = 16 << 20
"""Largest answer; 45,000 replicas of 15,000 shards take less than 1 MiB."""
_TIMEOUT_S = 2.0


class Dialect(StrEnum):
    """How a member of an ensemble reports that it leads."""

    ETCD = "etcd"
    """`POST /v3/maintenance/status` of etcd's HTTP gateway."""
    ZOOKEEPER = "zookeeper"
    """`GET /commands/leader` of ZooKeeper's AdminServer."""
    PLAIN = "plain"
    """`GET` of the address itself answers `{"leader": true}`."""


async def read(url: str, *, post: bool = False) -> Any:
    """Return the JSON answer of an address. Raises `Unreachable` for any other answer."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.request(
                "POST" if post else "GET",
                url,
                data=b"{}" if post else None,
                allow_redirects=False,
                headers={"Accept-Encoding": "identity"},
            ) as response,
        ):
            answer = await response.content.read(ANSWER_MAX_BYTES + 1)
            while len(answer) <= ANSWER_MAX_BYTES and not response.content.at_eof():
                answer += await response.content.read(ANSWER_MAX_BYTES + 1)
            if response.status != 200 or len(answer) > ANSWER_MAX_BYTES:
                raise Unreachable(f"{url} answered HTTP {response.status}, {len(answer)} bytes")
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        raise Unreachable(f"cannot ask {url}: {type(e).__name__}") from e
    try:
        return msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise Unreachable(f"{url} did not answer with JSON") from e


async def leader(members: Sequence[str], dialect: Dialect) -> int | None:
    """Return the index of the only member that reports to lead; None: no member or several."""
    leads = await asyncio.gather(*(_leads(url.rstrip("/"), dialect) for url in members))
    leading = [index for index, is_leader in enumerate(leads) if is_leader]
    return leading[0] if len(leading) == 1 else None


async def _leads(url: str, dialect: Dialect) -> bool:
    """Return whether a member reports that it leads; an unusable answer counts as no."""
    try:
        match dialect:
            case Dialect.ETCD:
                status = await read(f"{url}/v3/maintenance/status", post=True)
                member = status["header"]["member_id"]
                return bool(status.get("leader")) and status["leader"] == member
            case Dialect.ZOOKEEPER:
                return (await read(f"{url}/commands/leader")).get("is_leader") is True
            case Dialect.PLAIN:
                return (await read(url)).get("leader") is True
    except (TwineError, AttributeError, KeyError, TypeError):
        return False


async def load(url: str) -> float:
    """Return the load that the application reports, 0 to 1; 1 without a valid report."""
    try:
        answer = await read(url)
        value = float(answer["load"] if isinstance(answer, dict) else answer)
        return 1.0 if math.isnan(value) else min(1.0, max(0.0, value))
    except (TwineError, KeyError, TypeError, ValueError):
        return 1.0


def by_task(document: Any) -> Mapping[int, frozenset[str]]:
    """Return the shards of each task from `{"shard": [tasks], …}`. Raises `ConfigError`."""
    try:
        replicas = msgspec.convert(document, dict[str, list[int]])
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"this is not a shard map: {e}", hint='as {"users-17": [0, 4, 9], …}'
        ) from e
    held: dict[int, set[str]] = {}
    for shard, tasks in replicas.items():
        for task in tasks:
            held.setdefault(task, set()).add(shard)
    return {task: frozenset(shards) for task, shards in held.items()}
