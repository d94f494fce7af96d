"""Which task serves a shard, as owners set it and clients receive it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region, scenario

from control_plane.api.endpoints import Endpoints
from control_plane.api.shards import PARTS, part_of, parts_of
from control_plane.store.memory import MemoryStore
from control_plane.store.records import SHARDS, encode
from wire.errors import NotFound, Unprocessable


def tasks(found: Endpoints) -> list[str]:
    return [e.task for e in found.endpoints]


@pytest.mark.behaviour("SD3")
@scenario()
async def test_a_shard_is_answered_for_by_its_tasks_in_their_order(w: World):
    """A shard's tasks are listed in the order of the map. Other tasks of the job are left out."""
    await w.deployed(a_job(3))
    discovery = w.cp.discovery
    view = await discovery.set_shard_map("web", {"a": [2, 0], "b": [1], "none": []})
    assert view.shards == {"a": [2, 0], "b": [1], "none": []}
    assert tasks(await discovery.shard_endpoints("web", "a", 0, 0)) == ["web-2", "web-0"]
    assert tasks(await discovery.shard_endpoints("web", "none", 0, 0)) == []
    with pytest.raises(NotFound, match="has no shard c"):
        await discovery.shard_endpoints("web", "c", 0, 0)


@scenario()
async def test_waiters_for_a_shard_are_woken_when_it_moves(w: World):
    await w.deployed(a_job(3))
    discovery = w.cp.discovery
    await discovery.set_shard_map("web", {"a": [0]})
    before = await discovery.shard_endpoints("web", "a", 0, 0)
    waiting = asyncio.create_task(discovery.shard_endpoints("web", "a", before.revision, 60))
    await asyncio.sleep(1)
    await discovery.set_shard_map("web", {"a": [0]})  # equal content is no change
    await asyncio.sleep(1)
    assert not waiting.done()
    await discovery.set_shard_map("web", {"a": [1]})
    assert tasks(await waiting) == ["web-1"]


@pytest.mark.behaviour("SD1")
@scenario()
async def test_a_task_that_is_not_listed_serves_no_shard(w: World):
    """A shard's clients learn of a failure as other clients do."""
    await w.deployed(a_job(3))
    discovery = w.cp.discovery
    await discovery.set_shard_map("web", {"a": [0, 1]})
    [machine] = w.region.copies("web-0")
    before = await discovery.shard_endpoints("web", "a", 0, 0)
    w.region.machines[machine].power_off()
    after = await discovery.shard_endpoints("web", "a", before.revision, 60)
    assert tasks(after) == ["web-1"]


@scenario()
async def test_a_map_that_names_no_task_of_the_job_changes_nothing(w: World):
    await w.deployed(a_job(3))
    await w.cp.discovery.set_shard_map("web", {"a": [0]})
    with pytest.raises(Unprocessable, match="task 3, and job web has no such task"):
        await w.cp.discovery.set_shard_map("web", {"a": [1], "b": [3]})
    assert w.cp.discovery.shard_map("web").shards == {"a": [0]}


def test_a_map_goes_with_its_job_and_survives_all_else():
    async def main() -> None:
        region, store = a_region(), MemoryStore(strict=True)
        async with World(region, store).running() as w:
            await w.deployed(a_job(3))
            await w.cp.discovery.set_shard_map("web", {f"s{i}": [i % 3] for i in range(100)})
            answer = w.cp.discovery.shard_map("web")
            assert len(answer.shards) == 100
        async with World(region, store).running() as w:
            assert w.cp.discovery.shard_map("web") == answer
            await w.cp.stop_job("web")
            async with asyncio.timeout(120):
                while (await w.store.list_prefix(SHARDS)).entries:
                    await asyncio.sleep(1)
            await w.deployed(a_job(3))
            assert w.cp.discovery.shard_map("web").shards == {}

    run(main())


@given(st.dictionaries(st.text("abc0-", min_size=1, max_size=8), st.lists(st.integers(0, 9))))
def test_parts_hold_each_shard_once(shards: dict[str, list[int]]):
    parts = parts_of(1.0, shards)
    assert set(parts) <= set(range(PARTS))
    together = {s: t for part in parts.values() for s, t in part.shards.items()}
    assert together == {s: list(dict.fromkeys(t)) for s, t in shards.items()}
    assert all(part_of(s) == n for n, part in parts.items() for s in part.shards)


def test_the_largest_map_is_stored_in_values_of_bounded_size():
    """etcd's limits: 256 KiB per value, 100 rows per transaction."""
    shards = {f"{i:063d}": list(range(14_984, 15_000)) for i in range(20_000)}
    parts = parts_of(1.0, shards)
    assert len(parts) <= 100
    assert max(len(encode(part)) for part in parts.values()) <= 256 << 10


@pytest.mark.behaviour("BUG-UX62")
@scenario()
async def test_a_map_may_name_a_task_above_a_gap_in_the_indexes(w: World):
    """Formerly a job with tasks 0 and 3 had its map refused: the job "has 2: 0 to 1"."""
    await w.deployed(a_job(4))
    record = w.cp._jobs.get("web")
    tasks = [task for task in record.tasks if task.index in (0, 3)]
    await w.cp._jobs.commit("web", replace(record, spec=replace(record.spec, tasks=2), tasks=tasks))
    await w.cp.discovery.set_shard_map("web", {"a": [0, 3]})
    with pytest.raises(Unprocessable, match="shard b is given to task 4, and job web has no such"):
        await w.cp.discovery.set_shard_map("web", {"b": [0, 4]})
    assert w.cp.discovery.shard_map("web").shards == {"a": [0, 3]}
