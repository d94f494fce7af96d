"""A region-wide control plane of two regions, with a shard for each region and a global shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_agents import Region
from virtual_time import run
from world import World, a_job

from agent.api import Limits
from control_plane.api.capacity import EntitlementSpec
from control_plane.store.memory import MemoryStore
from wire.errors import ConfigError, Conflict, InvalidInput, Unprocessable

pytestmark = pytest.mark.behaviour("SH13")

BOTH = {"1": "west", "2": "east"}
ALONE = Limits(memory_max_bytes=600 << 20)
"""Memory of a task that leaves no room for another task on its machine."""


@asynccontextmanager
async def two_regions(store: MemoryStore | None = None, **settings: object) -> AsyncIterator[World]:
    """Run four machines in each of two regions; shard 0 is global, 1 is west, 2 is east."""
    region = Region()
    for number in range(4):
        region.add(f"w{number}", "dc1", "msb1", region="west")
        region.add(f"e{number}", "dc2", "msb2", region="east")
    w = World(
        region,
        store or MemoryStore(strict=True),
        **({"shards": 3, "shard_regions": BOTH} | settings),
    )
    async with w.running():
        for machine in region.machines.values():
            await w.cp.joined(machine.join())
        yield w


async def put(w: World, name: str, region: str | None, machines: int = 2) -> None:
    spec = EntitlementSpec(machines=machines, host_profile="web", region=region)
    await w.cp.capacity.put_entitlement(name, spec)


async def deploy(w: World, name: str, region: str | None, tasks: int = 2) -> None:
    """Create an entitlement and a job of it, and wait until the job is stable."""
    await put(w, name, region)
    await w.cp.apply_job(a_job(tasks, name=f"job-{name}", entitlement=name))
    await w.stable(f"job-{name}")


async def stop(w: World, name: str) -> None:
    """Stop the job of an entitlement, and wait until it has returned its machines."""
    await w.cp.stop_job(f"job-{name}")
    await w.until(lambda: w.cp._jobs.find(f"job-{name}") is None)
    await w.until(lambda: not held(w, name), within_s=600)


def owner(w: World, name: str) -> int:
    return w.cp.shards.number_of_entitlement(name)


def held(w: World, name: str) -> set[str]:
    return {record.machine for record in w.cp._broker.held(name)}


def starts(w: World) -> dict[str, list[str]]:
    return {name: list(machine.starts) for name, machine in w.region.machines.items()}


@pytest.mark.behaviour("SH13")
def test_an_entitlement_goes_to_the_shard_of_its_region_and_its_tasks_stay_there() -> None:
    """The load of shards does not matter. Entitlements without a pin go to the global shard."""

    async def main() -> None:
        async with two_regions() as w:
            for name, region in (("pay", "west"), ("web", "west"), ("ads", None), ("log", "east")):
                await deploy(w, name, region)
            assert [owner(w, name) for name in ("pay", "web", "ads", "log")] == [1, 1, 0, 2]
            assert {name[0] for name in held(w, "pay") | held(w, "web")} == {"w"}
            assert {name[0] for name in held(w, "log")} == {"e"}
            loads = w.cp.shards.loads()
            assert [load.region for load in loads] == ["", "west", "east"]
            assert [load.pinned for load in loads] == [
                {},
                {"pay": "west", "web": "west"},
                {"log": "east"},
            ]

    run(main())


@pytest.mark.behaviour("SH13")
def test_without_a_ready_shard_of_its_region_a_global_one_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    async def main() -> None:
        async with two_regions(shards=4) as w:

            async def is_ready(shard: int) -> bool:
                return shard != 1

            monkeypatch.setattr(w.cp.shards, "is_ready", is_ready)
            await deploy(w, "ads", None)
            await deploy(w, "pay", "west")
            assert (owner(w, "ads"), owner(w, "pay")) == (0, 3)

    run(main())


@pytest.mark.behaviour("SH13")
def test_a_move_out_of_scope_is_refused_and_one_within_restarts_nothing() -> None:
    """A planned move out of scope is refused too, and changes nothing."""

    async def main() -> None:
        async with two_regions() as w:
            await deploy(w, "ads", None)
            await deploy(w, "pay", "west")
            before = starts(w)
            for dry_run in (True, False):
                with pytest.raises(Conflict, match="that shard is for region east"):
                    await w.cp.shards.move("pay", 2, dry_run=dry_run)
                with pytest.raises(Conflict, match="not pinned to a region"):
                    await w.cp.shards.move("ads", 1, dry_run=dry_run)
            assert (owner(w, "ads"), owner(w, "pay")) == (0, 1)
            assert (await w.cp.shards.move("pay", 0)).done
            assert (await w.cp.shards.move("pay", 1)).done
            await asyncio.sleep(120)
            assert starts(w) == before

    run(main())


@pytest.mark.behaviour("SH13")
def test_the_region_of_an_entitlement_changes_in_a_global_shard_only() -> None:
    """A shard of the new region gets the entitlement once it has left the old machines."""

    async def main() -> None:
        async with two_regions() as w:
            await deploy(w, "pay", "west")
            for region in ("east", None):
                with pytest.raises(Conflict, match="shard 1 owns it, which is for region west"):
                    await put(w, "pay", region)
            await put(w, "pay", "west", machines=3)
            await w.cp.shards.move("pay", 0)
            await put(w, "pay", "east")
            with pytest.raises(Conflict, match=r"still holds \d machines elsewhere: w"):
                await w.cp.shards.move("pay", 2)
            await stop(w, "pay")
            await w.cp.apply_job(a_job(2, name="job-pay", entitlement="pay"))
            await w.stable("job-pay")
            assert {name[0] for name in held(w, "pay")} == {"e"}
            assert (await w.cp.shards.move("pay", 2)).done

    run(main())


@pytest.mark.behaviour("SH13")
def test_a_move_that_an_unpinning_overtakes_is_refused_at_its_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entitlement stays where it was, with its tasks."""

    async def main() -> None:
        async with two_regions() as w:
            await deploy(w, "pay", "west")
            await w.cp.shards.move("pay", 0)
            await asyncio.sleep(5.0)  # its new shard has sent its first requests
            asking = w.cp.shards.all[0].scheduler.requests.asking
            asking.add("job-pay")
            moving = asyncio.create_task(w.cp.shards.move("pay", 1))
            await w.until(lambda: w.cp.ownership.moving)
            await put(w, "pay", None)
            asking.clear()
            with pytest.raises(Conflict, match="the entitlement is not pinned to a region"):
                await moving
            assert owner(w, "pay") == 0
            await w.cp.apply_job(a_job(1, name="job-pay", entitlement="pay"))
            await w.stable("job-pay")

    run(main())


@pytest.mark.behaviour("SH13")
def test_a_name_that_is_used_again_is_still_in_its_old_shard() -> None:
    """Hosts remember the owner of a deleted entitlement, so the map keeps the owner."""

    async def main() -> None:
        async with two_regions() as w:
            await deploy(w, "pay", "west")
            await stop(w, "pay")
            await w.cp.capacity.delete_entitlement("pay")
            with pytest.raises(Conflict, match="shard 1 owns it") as refused:
                await put(w, "pay", None)
            assert "--region west; then twinectl shard move pay --to 0" in refused.value.hint
            await put(w, "pay", "west")
            await w.cp.shards.move("pay", 0)
            await put(w, "pay", None)

    run(main())


@pytest.mark.behaviour("SH13")
def test_a_start_with_regions_that_contradict_the_map_is_refused() -> None:
    """Matching regions or no regions are accepted. An old store has no region anywhere."""

    async def main() -> None:
        store = MemoryStore(strict=True)
        async with two_regions(store, shard_regions={}) as w:
            await deploy(w, "ads", None)
            await deploy(w, "pay", "west")
            assert (owner(w, "ads"), owner(w, "pay")) == (0, 1), "all shards are global"
            region, before = w.region, starts(w)
        with pytest.raises(ConfigError, match="'pay' in shard 1 is pinned to region west"):
            async with World(region, store, shards=3, shard_regions={"1": "east"}).running():
                pass
        again = World(region, store, shards=3, shard_regions=BOTH)
        async with again.running():
            await again.stable("job-pay")
            assert (owner(again, "pay"), starts(again)) == (1, before)
            with pytest.raises(Conflict, match="shard 1 owns it"):
                await put(again, "pay", None)

    run(main())


@pytest.mark.behaviour("SH13")
def test_machines_of_a_region_are_promised_to_entitlements_pinned_to_it() -> None:
    """A global entitlement leaves these machines, and a pin to an unknown region is refused."""

    async def main() -> None:
        async with two_regions() as w:
            await put(w, "pay", "west", machines=3)
            with pytest.raises(Unprocessable, match="3 machines granted to others"):
                await put(w, "ads", None, machines=6)
            with pytest.raises(InvalidInput, match="region: no machine is in region north"):
                await put(w, "ads", "north", machines=1)
            await put(w, "ads", None, machines=5)
            job = a_job(
                2, name="job-ads", entitlement="ads", requires=["region = west"], limits=ALONE
            )
            await w.cp.apply_job(job)
            await w.until(lambda: len(held(w, "ads")) == 1)
            found = await w.cp.job_planner.explain("job-ads")
            assert "reserved for others" in str(found.reasons)
            await w.cp.apply_job(a_job(3, name="job-pay", entitlement="pay", limits=ALONE))
            await w.stable("job-pay")
            assert {name[0] for name in held(w, "pay")} == {"w"}

    run(main())


@pytest.mark.behaviour("SH13", "MO16")
def test_a_reservation_is_pinned_as_its_base_is_and_lives_in_its_shard() -> None:

    async def main() -> None:
        async with two_regions() as w:
            await deploy(w, "pay", "west")
            stacked = EntitlementSpec(machines=1, host_profile="web", materialization="pay")
            await w.cp.capacity.put_entitlement("refunds", stacked)
            assert owner(w, "refunds") == 1
            wrong = EntitlementSpec(
                machines=1, host_profile="web", materialization="pay", region="east"
            )
            with pytest.raises(InvalidInput, match="region: its machines must be those of 'pay'"):
                await w.cp.capacity.put_entitlement("refunds", wrong)

    run(main())
