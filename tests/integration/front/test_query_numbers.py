"""Counts in queries are whole numbers: a front end refuses other ones and truncates none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.api.routes import ROUTES
from wire.errors import InvalidInput

from .conftest import Region

COUNTS = {"limit": 1} | dict.fromkeys(("before", "after", "tail", "expect"), 0)
"""Parameter → its least value; `after` is a name where machines are listed."""
CASES = [
    (route, name)
    for route in ROUTES
    for name in route.query
    if name in COUNTS and (route.name, name) != ("list_machines", "after")
]
PATH = {"index": "0", "dimension": "hold"}


@pytest.mark.behaviour("BUG-CP110")
@pytest.mark.parametrize(("route", "name"), CASES, ids=[f"{r.name}-{n}" for r, n in CASES])
def test_counts_in_queries_are_whole_numbers(region: Region, route: Any, name: str) -> None:
    async def ask(value: str) -> None:
        path = {part: PATH.get(part, "no") for part in route.parameters}
        async with region.client() as client:
            if route.stream_out:
                async for _ in client.stream(route, **path, **{name: value}):
                    return
            await client.call(route, **path, **{name: value})

    least = COUNTS[name]
    for value in ("1.5", "-1", "x", "1e400", *(("0",) if least else ())):
        with pytest.raises(InvalidInput, match=f"parameter {name} must be a .*number >= "):
            asyncio.run(ask(value))
