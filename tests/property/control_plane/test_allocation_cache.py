"""The cache always returns the answer that a fresh computation returns."""

import asyncio
from dataclasses import replace

import pytest
from allocating import HARDWARE, TASK, a_request
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api import Location
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.transactions import Allocation, Allocations
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.capacity import Capacity, Place
from control_plane.store.memory import MemoryStore

pytestmark = pytest.mark.behaviour("AL13")

NAMES = [f"m{n}" for n in range(6)]
MACHINE = st.sampled_from(NAMES)
LARGE = replace(TASK, cpus=3.0)
REQUESTS = [
    a_request(4, "a"),
    a_request(6, "a"),
    a_request(4, "a", demand=LARGE),
    a_request(5, "a", gang=True, demand=LARGE),
    Request("a", "front", (Group(TASK, (0, 1, 2, 3), running=False),)),
    a_request(3, "b", demand=LARGE),
    a_request(9, "b"),
    a_request(0, "b"),
    a_request(3, "c", "back"),
    a_request(7, "c", "back", LARGE),
]
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(REQUESTS)),
    st.tuples(st.just("block"), MACHINE),
    st.tuples(st.just("unblock"), MACHINE),
    st.tuples(st.just("shrink"), MACHINE),
    st.tuples(st.just("restore"), MACHINE),
    st.tuples(st.just("release"), MACHINE),
    st.tuples(st.just("lose"), MACHINE),
    st.tuples(st.just("join"), MACHINE),
    st.tuples(st.just("quota"), st.sampled_from([1, 3, None])),
    st.tuples(st.just("fail"), st.just("")),
)
WHOLE = Capacity("web", HARDWARE.rru, HARDWARE.cpus, 4 << 30)


class Willing:
    """Brokers that carry out every request; the store fails now and then."""

    async def prepare(self, transaction, takes) -> None:
        pass

    async def commit(self, transaction) -> None:
        pass

    async def abort(self, transaction) -> None:
        pass

    def in_doubt(self) -> dict[str, object]:
        return {}


class Failing(MemoryStore):
    fails = False

    async def txn(self, compare, operations) -> int:
        if self.fails:
            self.fails = False
            raise OSError("no space left on device")
        return await super().txn(compare, operations)


class Model:
    def __init__(self, store: Failing) -> None:
        self.store = store
        self.quota: int | None = 3
        self.index = RegionIndex()
        self.allocations = Allocations(store, self.index, Willing())
        for name in NAMES:
            self.put(name, WHOLE, FREE, "")

    def put(self, name: str, capacity: Capacity, pool: str, blocked: str) -> None:
        number = int(name[1:])
        place = Place.of(Location(datacenter=f"dc{number % 2}", msb=f"msb{number % 3}"))
        self.index.put(name, capacity, place, pool, blocked)

    def allowance(self, index: RegionIndex, pool: str) -> Allowance:
        left = None if self.quota is None else self.quota - index.pool(pool).size
        return Allowance(machines=left)

    async def happen(self, kind: str, what) -> None:
        machine = self.index.machines.get(what) if isinstance(what, str) else None
        match kind:
            case "ask":
                await self.ask(what)
            case "quota":
                self.quota = what
                self.index.note_gain()
            case "fail":
                self.store.fails = True
            case "join" if machine is None:
                self.put(what, WHOLE, FREE, "")
            case "lose" if machine is not None:
                self.index.remove(what)
            case "release" if machine is not None and not machine.jobs:
                self.put(what, machine.capacity, FREE, machine.blocked)
            case "block" | "unblock" if machine is not None:
                self.index.block(what, "is down" if kind == "block" else "")
            case "shrink" | "restore" if machine is not None:
                capacity = replace(WHOLE, memory_bytes=3 << 30) if kind == "shrink" else WHOLE
                self.put(what, capacity, machine.pool, machine.blocked)

    async def ask(self, request: Request) -> None:
        before = self.allocations.counts.hits
        try:
            got = await self.allocations.allocate(
                request, lambda: self.allowance(self.index, request.pool)
            )
        except OSError:
            return
        if self.allocations.counts.hits > before:
            self.compare(request, got)

    def compare(self, request: Request, got: Allocation) -> None:
        """Compare an answer of the cache with that of a newly built index."""
        fresh = RegionIndex()
        for m in self.index.machines.values():
            fresh.put(m.name, m.capacity, m.place, m.pool, m.blocked)
        for job, claims in self.index.claims.items():
            moved = [c._replace(machine=fresh.machines[c.machine.name]) for c in claims]
            fresh.restore(job, claims.pool, moved)
        made = plan(fresh, request, self.allowance(fresh, request.pool))
        assert made.change.is_empty
        assert made.unplaced == got.unplaced


@pytest.mark.behaviour("AL13")
@settings(deadline=None, max_examples=200)
@given(st.lists(EVENTS, max_size=40))
def test_the_cache_equals_a_fresh_computation(events):
    async def main() -> None:
        async with Failing() as store:
            model = Model(store)
            for kind, what in events:
                await model.happen(kind, what)

    asyncio.run(main())
