"""No entitlement is ever in a shard whose scope excludes it, under any concurrency."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import cycle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.ownership import ShardLoad
from control_plane.portal.portal import Portal, Use
from control_plane.runtime.runtime import Runtime
from control_plane.shards.core.scopes import least_loaded_first, may_own
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.scoping import ShardScopes
from control_plane.store import Operation
from control_plane.store.memory import MemoryStore
from wire.errors import TwineError

pytestmark = pytest.mark.behaviour("SH13")

SHARDS, REGIONS = 3, ("west", "east")
SCOPES = st.dictionaries(
    st.integers(1, SHARDS - 1).map(str), st.sampled_from(REGIONS), max_size=SHARDS - 1
)
PINS = st.sampled_from((None, *REGIONS))
NAMES = st.sampled_from(("pay", "pay", "ads"))
ACTS = st.one_of(
    st.tuples(st.just("put"), NAMES, PINS),
    st.tuples(st.just("put"), NAMES, PINS),
    st.tuples(st.just("delete"), NAMES),
    st.tuples(
        st.just("give"), NAMES, st.lists(st.integers(0, 9), min_size=SHARDS, max_size=SHARDS)
    ),
    st.tuples(st.just("move"), NAMES, st.integers(0, SHARDS - 1)),
    st.tuples(st.just("move"), NAMES, st.integers(0, SHARDS - 1)),
)
PINNED, UNPINNED, MOVED = ("put", "pay", "west"), ("put", "pay", None), ("move", "pay", 1)
LOADS = st.lists(
    st.builds(
        ShardLoad,
        shard=st.integers(0, 63),
        load=st.integers(0, 9),
        jobs=st.integers(0, 3),
        region=st.sampled_from(("", *REGIONS)),
    ),
    unique_by=lambda load: load.shard,
)


class SlowStore(MemoryStore):
    """Lets other writers run between a check and the write that relies on it."""

    def __init__(self, turns: Sequence[int]) -> None:
        super().__init__()
        self._turns = cycle(turns)

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        for _ in range(next(self._turns)):
            await asyncio.sleep(0)
        return await super().txn(compare, operations)


class Life:
    """The portal, the map of owners and the scopes, as the core keeps them."""

    def __init__(self, store: MemoryStore, regions: Mapping[str, str]) -> None:
        self.portal, self.owners = Portal(store, Runtime()), OwnershipMap(store)
        self.scopes = ShardScopes(regions, self.owners, self.portal.table, lambda _: ())
        self.portal.in_scope = self.scopes.check_change
        self.refused = 0

    async def act(self, kind: str, *given: object) -> None:
        try:
            await getattr(self, kind)(*given)
        except TwineError:
            self.refused += 1

    async def put(self, name: str, region: str | None) -> None:
        await self.portal.put(name, EntitlementSpec(machines=1, region=region), jobs=[])

    async def delete(self, name: str) -> None:
        await self.portal.delete(name, Use())

    async def give(self, name: str, loads: list[int]) -> None:
        found = [
            ShardLoad(shard=n, load=load, region=self.scopes.region_of(n))
            for n, load in enumerate(loads)
        ]
        best = least_loaded_first(found, self.scopes.pin_of(name))[0]
        await asyncio.sleep(0)  # queries readiness of the shard's process
        await self.owners.give(name, best, self.scopes.check_new_owner(name, best))

    async def move(self, name: str, to: int) -> None:
        self.portal.table.get(name)
        await self.owners.move(name, to, self.scopes.check_new_owner(name, to))

    def check(self) -> None:
        for record in self.portal.table.records():
            shard = self.owners.shard_of(record.name)
            assert may_own(self.scopes.region_of(shard), record.spec.region), (record.name, shard)
        self.scopes.check_owners()


@pytest.mark.behaviour("SH13")
@settings(deadline=None, max_examples=100)
@given(
    SCOPES,
    st.lists(st.lists(ACTS, min_size=1, max_size=4), min_size=1, max_size=10),
    st.lists(st.integers(0, 5), min_size=1, max_size=7),
)
@example({"1": "west"}, [[PINNED], [UNPINNED, MOVED]], [0, 5, 0])  # it moves before it is unpinned
@example({"1": "west"}, [[PINNED], [MOVED, UNPINNED]], [0, 5, 0])  # it is unpinned before it moves
def test_no_entitlement_enters_a_shard_with_a_scope_that_excludes_it(
    regions: dict[str, str], batches: list[list[tuple[object, ...]]], turns: list[int]
) -> None:
    """Grants, changes of region, transfers and moves run at the same time; each may fail."""

    async def live() -> None:
        async with SlowStore(turns) as store:
            life = Life(store, regions)
            for batch in batches:
                await asyncio.gather(*(life.act(*act) for act in batch))
                life.check()
            again = Life(store, regions)
            await again.portal.load()
            await again.owners.load()
            again.check()

    asyncio.run(live())


@pytest.mark.behaviour("SH13")
@given(LOADS, st.sampled_from((None, *REGIONS)))
def test_the_order_of_shards_leaves_out_what_may_not_own_and_puts_the_region_first(
    loads: list[ShardLoad], region: str | None
) -> None:
    by_number = {load.shard: load for load in loads}
    order = [by_number[number] for number in least_loaded_first(loads, region)]
    assert {load.shard for load in order} == {
        load.shard for load in loads if load.region in ("", region)
    }
    regional = [bool(load.region) for load in order]
    assert regional == sorted(regional, reverse=True)
    for of in (True, False):
        alike = [(load.load, load.jobs) for load in order if bool(load.region) is of]
        assert alike == sorted(alike)
