"""The counts of lost capacity follow the records of machines and tasks."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from test_limits import a_world
from virtual_time import run
from world import a_job

from agent.api import Limits as TaskLimits

LARGE = TaskLimits(memory_max_bytes=700 << 20)


@pytest.mark.behaviour("AV5", "BUG-CP162")
def test_tasks_count_in_the_data_center_to_which_their_machine_moves() -> None:
    async def main() -> None:
        w = a_world(3)
        async with asyncio.timeout(20_000), w.running():
            await w.deployed(a_job(3, limits=LARGE), quota=3)
            losses = w.cp.shards.all[0].scheduler._losses
            moved = w.cp._broker.table.get(w.cp._jobs.get("web").tasks[0].placement.machine)
            elsewhere = replace(moved, location=replace(moved.location, datacenter="dc2"))
            losses._machine_changed(moved.machine, moved, elsewhere)
            assert "0 of 2 tasks in dc1" in losses.describe("dc1")
            assert "0 of 1 tasks in dc2" in losses.describe("dc2")
            await w.cp.stop_job("web")
            await w.until(lambda: "0 of 0 tasks in dc1" in losses.describe("dc1"))
            assert "0 of 0 tasks in dc2" in losses.describe("dc2")

    run(main())
