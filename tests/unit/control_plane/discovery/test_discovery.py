"""What clients of a job are told, and when."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from msgspec.structs import replace
from world import World, a_job, scenario

from agent.errors import NotFound


@scenario()
async def test_a_machine_that_joins_again_elsewhere_is_listed_at_its_new_address(w: World):
    """BUG-CP12: the endpoints kept the address that the machine had when its task was listed."""
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")
    moved = w.region.machines["m1"]
    waiting = asyncio.create_task(w.cp.endpoints("web", after=before.revision, wait_s=30))
    await asyncio.sleep(1)
    await w.cp.joined(replace(moved.join(), address="192.0.2.7:7443"))
    after = await waiting
    hosts = {endpoint.machine: endpoint.host for endpoint in after.endpoints}
    assert after.revision > before.revision
    assert hosts == {"m1": "192.0.2.7", "m2": "m2.example", "m3": "m3.example"}


@scenario()
async def test_a_machine_that_joins_again_where_it_was_wakes_nobody(w: World):
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")
    await w.cp.joined(w.region.machines["m1"].join())
    assert await w.cp.endpoints("web", after=before.revision, wait_s=5) == before


@scenario()
async def test_who_waits_for_a_job_that_ends_is_told_and_nothing_is_kept(w: World):
    """BUG-CP23: entries of jobs that are gone."""
    await w.deployed(a_job(3))
    before = await w.cp.endpoints("web")

    async def wait() -> None:
        after = before.revision
        while True:
            after = (await w.cp.endpoints("web", after=after, wait_s=60)).revision

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(1)
    await w.cp.stop_job("web")
    with pytest.raises(NotFound):
        await waiting
    discovery = w.cp._discovery
    assert not discovery._changed
    assert not discovery._endpoints
    assert not discovery._revisions
