"""The load of tests/lab/test_2_dbus_failures.py ends at once when a part of it fails."""

from __future__ import annotations

import asyncio

import pytest

from tests.lab.bus_load import going


async def fails() -> None:
    raise RuntimeError("no such image")


async def runs(seen: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        seen.append("ended")


async def test_a_failed_part_ends_its_waiters_with_its_error() -> None:
    seen: list[str] = []
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="no such image")):
        async with asyncio.timeout(30), going(fails(), runs(seen)):
            await asyncio.Event().wait()  # waits for cycles that never come
    assert seen == ["ended"]


async def test_endless_loops_end_with_the_work_they_accompany() -> None:
    seen: list[str] = []
    async with going(runs(seen)):
        await asyncio.sleep(0)
    assert seen == ["ended"]
