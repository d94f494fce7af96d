"""What one pool may take at once leaves all other pools their promised machines."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from regions import a_capacity, a_place

from control_plane.allocator import promises
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.promises import PromiseKeeper
from control_plane.broker.core.assignment import FREE
from control_plane.portal.core.grants import MachineClass, Promises, quota_left
from control_plane.portal.core.pools import MICRO, HeldCapacity, Quota
from control_plane.runtime.runtime import Runtime

pytestmark = pytest.mark.behaviour("CP7")

KINDS = [
    MachineClass("a", "dc1", 2 * MICRO),
    MachineClass("a", "dc2", 2 * MICRO),
    MachineClass("b", "dc1", 3 * MICRO),
    MachineClass("c", "dc2", 5 * MICRO),
    MachineClass("a", "dc1", 2 * MICRO, "west"),
]
SUPPLIES = st.fixed_dictionaries({kind: st.integers(0, 4) for kind in KINDS})
DATACENTERS = st.sampled_from([None, None, "dc1", "dc2"])
REGIONS = st.sampled_from([None, None, None, "local", "west"])
QUOTAS = st.one_of(
    st.builds(
        Quota,
        machines=st.integers(1, 5),
        types=st.sampled_from([frozenset(), frozenset("a"), frozenset("ab"), frozenset("c")]),
        datacenter=DATACENTERS,
        region=REGIONS,
    ),
    st.builds(
        Quota,
        per_type=st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
        datacenter=DATACENTERS,
        region=REGIONS,
    ),
)


@settings(deadline=None, max_examples=300)
@given(SUPPLIES, st.dictionaries(st.sampled_from("wxyz"), QUOTAS, min_size=2))
def test_taking_unpromised_machines_breaks_no_promise(supply, quotas):
    pools = Promises(quotas, supply)
    kept = [pool for pool in quotas if pools.shortage(pool) is None]
    for pool in kept:
        for kind, count in pools.spare(pool).items():
            assert count <= supply[kind]
            taken = Counter[MachineClass]()
            while taken[kind] < count and allows(quotas[pool], taken, kind):
                taken[kind] += 1
            left = {**quotas, pool: quota_left(quotas[pool], taken)}
            after = Promises(left, Counter(supply) - taken)
            assert [p for p in kept if p != pool and after.shortage(p)] == []


def allows(quota: Quota, held: Counter[MachineClass], kind: MachineClass) -> bool:
    if not quota.allows(kind.machine_type, kind.datacenter, kind.region):
        return False
    after = HeldCapacity()
    for each in (*held.elements(), kind):
        after.add(each.machine_type, each.micro_rru / MICRO)
    return not quota.excess(after)


class HastyRuntime(Runtime):
    """Yields to other coroutines at every opportunity."""

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Life:
    """A region with many pools; machines change hands while the sums are computed."""

    def __init__(self, supply: dict[MachineClass, int], quotas: dict[str, Quota]) -> None:
        self.index, self.quotas = RegionIndex(), quotas
        self.names = 0
        self.kinds = {kind: kind for kind in KINDS}
        for kind, count in supply.items():
            for _ in range(count):
                self.add(kind)
        self.keeper = PromiseKeeper(
            self.index, lambda: self.quotas, lambda _: Counter(), HastyRuntime()
        )

    def add(self, kind: MachineClass) -> None:
        self.names += 1
        self.move(f"m{self.names}", kind, FREE)

    def move(self, name: str, kind: MachineClass, pool: str) -> None:
        rru = kind.micro_rru / MICRO
        capacity = a_capacity(kind.machine_type, rru=rru)
        self.index.put(name, capacity, a_place(dc=kind.datacenter, region=kind.region), pool, "")

    def of(self, pool: str) -> Counter[MachineClass]:
        found = Counter[MachineClass]()
        for machine in self.index.machines.values():
            if machine.pool == pool:
                found[self.kind(machine)] += 1
        return found

    def kind(self, machine) -> MachineClass:
        rru = round(machine.capacity.rru * MICRO)
        place = machine.place
        return MachineClass(machine.capacity.machine_type, place.datacenter, rru, place.region)

    def unkept(self) -> set[str]:
        """Return the pools whose promises cannot be kept, by a full recomputation."""
        left = {pool: quota_left(quota, self.of(pool)) for pool, quota in self.quotas.items()}
        sums = Promises(left, self.of(FREE))
        return {pool for pool in self.quotas if sums.shortage(pool) is not None}

    def take(self, pool: str, kind: MachineClass) -> None:
        limits = self.keeper.limits(pool)
        key = (kind.machine_type, kind.datacenter, kind.micro_rru, kind.region)
        if limits is not None and limits.get(key, 1) <= 0:
            return
        if not allows(self.quotas[pool], self.of(pool), kind):
            return
        free = (m for m in self.index.machines.values() if m.pool == FREE)
        machine = next((m for m in free if self.kind(m) == kind), None)
        if machine is not None:
            before = self.unkept()
            self.move(machine.name, kind, pool)
            assert self.unkept() - {pool} <= before

    def give_back(self, pool: str, kind: MachineClass) -> None:
        for machine in self.index.machines.values():
            if machine.pool == pool and self.kind(machine) == kind:
                self.move(machine.name, kind, FREE)
                return

    def lose(self, pool: str, kind: MachineClass) -> None:
        for name, machine in self.index.machines.items():
            if machine.pool == pool and self.kind(machine) == kind:
                self.index.remove(name)
                return


ACTS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from("wxyz"), st.sampled_from(KINDS)),
    st.tuples(st.just("take"), st.sampled_from("wxyz"), st.sampled_from(KINDS)),
    st.tuples(st.just("give_back"), st.sampled_from("wxyz"), st.sampled_from(KINDS)),
    st.tuples(st.just("lose"), st.sampled_from(["w", "x", FREE]), st.sampled_from(KINDS)),
    st.tuples(st.just("add"), st.sampled_from(KINDS)),
    st.tuples(st.just("quota"), st.sampled_from("wxyz"), QUOTAS),
    st.tuples(st.just("turns"), st.integers(1, 30)),
)


@pytest.mark.behaviour("BUG-CP6", "BUG-CP2")
@settings(deadline=None, max_examples=200)
@given(
    SUPPLIES,
    st.fixed_dictionaries(dict.fromkeys("wxyz", QUOTAS)),
    st.lists(ACTS, min_size=5, max_size=30),
)
def test_promises_are_kept_while_machines_change_hands_and_sums_are_under_way(supply, quotas, acts):
    """At every step of the computation, no take breaks another pool's promise."""

    async def live() -> None:
        life = Life(supply, quotas)
        runs = asyncio.create_task(life.keeper.run())
        for name, *rest in acts:
            if name == "turns":
                for _ in range(rest[0]):
                    await asyncio.sleep(0)
            elif name == "quota":
                life.quotas = {**life.quotas, rest[0]: rest[1]}
            else:
                getattr(life, name)(*rest)
            assert not runs.done()
        runs.cancel()

    many, promises.MANY = promises.MANY, 1
    try:
        asyncio.run(live())
    finally:
        promises.MANY = many
