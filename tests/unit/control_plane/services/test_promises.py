"""What is promised to others, kept up to date as machines and quotas change (CP7)."""

import asyncio

from regions import add

from control_plane.core.machine_pools import FREE
from control_plane.core.pools import MICRO, Quota
from control_plane.core.region_index import RegionIndex
from control_plane.services import promises
from control_plane.services.promises import PromiseKeeper

PLAIN, RARE = ("plain", "dc1", 4 * MICRO), ("rare", "dc1", 4 * MICRO)
ANY, ONLY = Quota(machines=2), Quota(per_type={"rare": 1})


def a_region() -> RegionIndex:
    index = RegionIndex()
    add(index, "m1", pool=FREE, machine_type="plain")
    add(index, "m2 m3", pool=FREE, machine_type="rare")
    return index


async def test_limits_follow_machines_and_quotas():
    index, quotas = a_region(), {"any": ANY, "only": ONLY}
    keeper = PromiseKeeper(index, lambda: quotas, lambda _: ())
    assert keeper.limits("any") == {PLAIN: 1, RARE: 1}
    assert keeper.limits("only") == {PLAIN: 0, RARE: 1}
    place = index.machines["m2"].place
    index.put("m2", index.machines["m2"].capacity, place, "only", "")
    assert keeper.limits("any") == {PLAIN: 1, RARE: 1}
    quotas = {"any": Quota(machines=1), "only": Quota(per_type={"rare": 2})}
    assert keeper.limits("any") == {PLAIN: 1, RARE: 0}


async def test_where_all_quotas_are_of_one_kind_nothing_is_kept():
    keeper = PromiseKeeper(a_region(), lambda: {"a": ANY, "b": Quota(machines=9)}, lambda _: ())
    assert keeper.limits("a") is None


async def test_machines_that_are_put_aside_do_not_count():
    index, aside = a_region(), []
    keeper = PromiseKeeper(
        index, lambda: {"any": Quota(machines=1), "only": ONLY}, lambda pool: () if pool else aside
    )
    assert keeper.limits("any") == {PLAIN: 1, RARE: 1}
    aside.append(index.machines["m2"])
    keeper.outdated()
    assert keeper.limits("any") == {PLAIN: 1, RARE: 0}


async def test_the_sums_of_many_pools_are_done_in_a_thread(monkeypatch):
    monkeypatch.setattr(promises, "MANY", 2)
    index = a_region()
    keeper = PromiseKeeper(index, lambda: {"any": ANY, "only": ONLY}, lambda _: ())
    runs = asyncio.create_task(keeper.run())
    gain = index.gain
    assert keeper.limits("any") is None
    async with asyncio.timeout(10):
        while keeper.limits("any") is None:
            await asyncio.sleep(0.001)
    assert keeper.limits("any") == {PLAIN: 1, RARE: 1}
    assert index.gain > gain  # those who wait are tried again
    runs.cancel()
