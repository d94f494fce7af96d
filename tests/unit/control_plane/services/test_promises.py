"""Promises to other entitlements, updated as machines and quotas change."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest
from regions import a_capacity, a_place, add

from control_plane.allocator import promises
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.promises import PromiseKeeper
from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.grants import MachineClass
from control_plane.portal.core.pools import MICRO, Quota
from control_plane.runtime.runtime import Runtime

pytestmark = pytest.mark.behaviour("CP7")

PLAIN, RARE = MachineClass("plain", "dc1", 4 * MICRO), MachineClass("rare", "dc1", 4 * MICRO)
P, R = ("plain", "dc1", 4 * MICRO, "local"), ("rare", "dc1", 4 * MICRO, "local")
ANY, ONLY = Quota(machines=2), Quota(per_type={"rare": 1})
NO_MACHINES = Counter[MachineClass]()


class HastyRuntime(Runtime):
    """Yields to other coroutines at every opportunity."""

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


def a_region() -> RegionIndex:
    index = RegionIndex()
    add(index, "m1", pool=FREE, machine_type="plain")
    add(index, "m2 m3", pool=FREE, machine_type="rare")
    return index


def a_keeper(index: RegionIndex, quotas: Mapping[str, Quota]) -> PromiseKeeper:
    return PromiseKeeper(index, lambda: quotas, lambda _: NO_MACHINES, HastyRuntime())


def give(index: RegionIndex, name: str, pool: str, machine_type: str = "rare") -> None:
    index.put(name, a_capacity(machine_type), a_place(), pool, "")


async def test_limits_follow_machines_and_quotas():
    index, quotas = a_region(), {"any": ANY, "only": ONLY}
    keeper = PromiseKeeper(index, lambda: quotas, lambda _: NO_MACHINES, HastyRuntime())
    assert keeper.limits("any") == {P: 1, R: 1}
    assert keeper.limits("only") == {P: 0, R: 1}
    give(index, "m2", "only")
    assert keeper.limits("any") == {P: 1, R: 1}
    quotas = {"any": Quota(machines=1), "only": Quota(per_type={"rare": 2})}
    assert keeper.limits("any") == {P: 1, R: 0}


async def test_where_all_quotas_are_of_one_kind_nothing_is_kept():
    assert a_keeper(a_region(), {"a": ANY, "b": Quota(machines=9)}).limits("a") is None


async def test_machines_that_are_put_aside_do_not_count():
    index, aside = a_region(), NO_MACHINES.copy()
    keeper = PromiseKeeper(
        index,
        lambda: {"any": Quota(machines=1), "only": ONLY},
        lambda pool: NO_MACHINES if pool else aside,
        HastyRuntime(),
    )
    assert keeper.limits("any") == {P: 1, R: 1}
    aside[RARE] += 1
    keeper.mark_outdated()
    assert keeper.limits("any") == {P: 1, R: 0}


async def until_known(keeper: PromiseKeeper, pool: str = "any") -> None:
    async with asyncio.timeout(10):
        while not any((keeper.limits(pool) or {}).values()):
            await asyncio.sleep(0)


async def test_the_sums_of_many_pools_do_not_block_the_loop(monkeypatch):
    monkeypatch.setattr(promises, "MANY", 2)
    index = a_region()
    keeper = a_keeper(index, {"any": ANY, "only": ONLY})
    runs = asyncio.create_task(keeper.run())
    gains, limits = index.gains("any"), keeper.limits("any")
    assert limits is not None
    assert limits
    assert limits.get(P, 1) == 0  # until the sums are known no entitlement grows
    await until_known(keeper)
    assert keeper.limits("any") == {P: 1, R: 1}
    assert index.gains("any") > gains  # waiting jobs are tried again
    runs.cancel()


@pytest.mark.behaviour("BUG-CP6")
async def test_takes_between_two_sums_are_subtracted(monkeypatch):
    """In a region of many pools, the limits were up to five seconds old."""
    monkeypatch.setattr(promises, "MANY", 2)
    index = a_region()
    keeper = a_keeper(index, {"any": ANY, "only": ONLY})
    runs = asyncio.create_task(keeper.run())
    await until_known(keeper)
    runs.cancel()
    assert keeper.limits("any") == {P: 1, R: 1}
    give(index, "m2", "any")
    assert keeper.limits("any") == {P: 1, R: 0}  # only m3 is left for the other entitlement
    assert keeper.limits("only") == {P: 0, R: 1}
    give(index, "m2", FREE)
    assert keeper.limits("any") == {P: 1, R: 1}


async def test_machines_of_a_whole_region_are_counted_in_parts(monkeypatch):
    """A step over a million machines blocked the loop for 0.8 s of computing."""
    monkeypatch.setattr(promises, "_BUCKETS", 2)
    index, parts = a_region(), []
    for number in range(7):
        add(index, f"other{number}", pool="any", machine_type=f"type{number}")
    keeper = a_keeper(index, {"any": Quota(machines=9), "only": ONLY})
    count_moves = keeper._count_moves
    monkeypatch.setattr(
        keeper, "_count_moves", lambda part: parts.append(len(part)) or count_moves(part)
    )
    await keeper.load()
    assert parts == [2, 2, 2, 2, 1]
    assert {k: n for k, n in (keeper.limits("any") or {}).items() if n} == {P: 1, R: 1}


async def test_machines_that_come_while_a_region_is_counted_count_too(monkeypatch):
    monkeypatch.setattr(promises, "_BUCKETS", 1)
    index = a_region()
    keeper = a_keeper(index, {"any": ANY, "only": ONLY})
    loading = asyncio.create_task(keeper.load())
    await asyncio.sleep(0)
    give(index, "m2", "only")
    add(index, "m4", pool=FREE, machine_type="plain")
    await loading
    assert keeper.limits("any") == {P: 2, R: 1}


@pytest.mark.behaviour("BUG-CP2")
async def test_machines_change_hands_at_every_step_of_the_sums(monkeypatch):
    """Sums in a thread crashed the process when the loop changed the collections under them."""
    monkeypatch.setattr(promises, "MANY", 2)
    index = RegionIndex()
    add(index, [f"plain{i}" for i in range(40)], pool=FREE, machine_type="plain")
    add(index, [f"rare{i}" for i in range(40)], pool=FREE, machine_type="rare")
    quotas = {f"any{i}": Quota(machines=1) for i in range(30)}
    quotas |= {f"only{i}": Quota(per_type={"rare": 1}) for i in range(30)}
    keeper = a_keeper(index, quotas)
    runs = asyncio.create_task(keeper.run())
    for round_ in range(400):
        name, pool = f"rare{round_ % 40}", f"only{round_ % 30}"
        give(index, name, pool if index.machines[name].pool == FREE else FREE)
        if round_ % 7 == 0:
            keeper.mark_outdated()
        keeper.limits(pool)
        assert not runs.done()
        await asyncio.sleep(0)
    runs.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs


def kept_without(keeper: PromiseKeeper, index: RegionIndex, pool: str, names: str) -> bool:
    work = keeper.kept_without(pool, [index.machines[name] for name in names.split()])
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return bool(stop.value)


@pytest.mark.behaviour("CP7", "SH14")
async def test_simultaneous_takes_are_judged_by_the_later_process():
    """Each process saw one rare machine to spare. This process took `m2`; the other took `m3`."""
    index = a_region()
    add(index, "m4", pool=FREE, machine_type="plain")
    keeper = a_keeper(index, {"any": ANY, "other": Quota(machines=1), "only": ONLY})
    assert keeper.limits("any") == {P: 2, R: 1}
    give(index, "m2", "any")
    assert kept_without(keeper, index, "any", "m2")
    give(index, "m3", "other")
    assert not kept_without(keeper, index, "any", "m2")
    keeper.limits("any")  # sums that include both only show that the promise is broken
    assert not kept_without(keeper, index, "any", "m2")
    assert kept_without(keeper, index, "only", "")


@pytest.mark.behaviour("CP7")
async def test_a_broken_promise_refuses_no_unrelated_machine():
    """The promise lacks a rare machine. Taking a plain machine does not affect it."""
    index = a_region()
    quotas = {"any": Quota(machines=1), "only": Quota(per_type={"rare": 3})}
    keeper = a_keeper(index, quotas)
    give(index, "m1", "any", "plain")
    assert kept_without(keeper, index, "any", "m1")
    give(index, "m1", FREE, "plain")
    give(index, "m2", "any")
    assert not kept_without(keeper, index, "any", "m2")


@pytest.mark.behaviour("CP7")
async def test_with_quotas_of_one_kind_all_takes_stay():
    """In that case nothing is counted."""
    index = a_region()
    keeper = a_keeper(index, {"a": ANY, "b": Quota(machines=9)})
    give(index, "m1", "a", "plain")
    assert kept_without(keeper, index, "a", "m1")
