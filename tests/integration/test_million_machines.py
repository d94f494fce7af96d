"""One allocator, without shards, on a region of more than a million machines in memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Mapping

import pytest

from control_plane.allocator.core.claims import Claims
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.transactions import Allocation, Allocations
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Kinds
from control_plane.broker.holds import Take
from control_plane.store.memory import MemoryStore
from vm_lab.region.generator import make_region

MACHINES = 1_000_200
TASK = Demand(memory_bytes=4 << 30, rru=0.2)


class Willing:
    """Brokers that release every requested machine."""

    def __init__(self) -> None:
        self.taken: dict[str, Take] = {}

    async def prepare(self, transaction: str, takes: Mapping[str, Take]) -> None:
        self.taken |= takes

    async def commit(self, transaction: str) -> None:
        pass

    async def abort(self, transaction: str) -> None:
        raise AssertionError(f"{transaction}: no competing transaction")

    def in_doubt(self) -> Mapping[str, object]:
        return {}


def generated(machines: int) -> RegionIndex:
    """Return the index of a region in which all machines are free."""
    index, kinds = RegionIndex(), Kinds()
    for record in make_region(machines):
        index.put(record.machine, kinds.capacity(record), kinds.place(record), FREE, "")
    return index


async def placed(index: RegionIndex, tasks: int) -> tuple[Allocation, dict[str, Take]]:
    brokers = Willing()
    async with MemoryStore() as store:
        allocations = Allocations(store, index, brokers)
        request = Request(f"web-{tasks}", "front", (Group(TASK, tuple(range(tasks))),))
        done = await allocations.allocate(request, Allowance, "web")
        assert allocations.counts.stored == 1
    return done, brokers.taken


def per(claims: Claims, level: str) -> Counter[str]:
    return Counter(getattr(claim.machine.place, level) for claim in claims)


@pytest.mark.behaviour("AL16", "AL8")
def test_one_allocator_manages_a_million_machines() -> None:
    gc.disable()  # a collection over these objects takes as long as creating them
    try:
        index = generated(MACHINES)
        assert len(index.machines) == MACHINES == index.pool(FREE).size

        average, taken = asyncio.run(placed(index, 36))  # the average job
        assert average.claims is not None
        assert not average.unplaced
        assert sorted(claim.task for claim in average.claims) == list(range(36))
        assert {claim.machine.name for claim in average.claims} == taken.keys()
        assert set(per(average.claims, "msb").values()) == {1}
        assert sorted(per(average.claims, "datacenter").values()) == [7, 7, 7, 7, 8]

        large, _ = asyncio.run(placed(index, 601))
        assert large.claims is not None
        assert not large.unplaced
        assert len(list(large.claims)) == 601
        assert Counter(per(large.claims, "msb").values()) == {10: 59, 11: 1}
    finally:
        gc.enable()

    known = weakref.ref(index)
    del index, average, large
    gc.collect()
    assert known() is None  # nothing else keeps the region in memory
