"""A bulk restore at a restart leaves the index as restoring claims one by one does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from regions import FREE, POOL, a_capacity, a_place, add, check, gains, state

from control_plane.allocator.core.allocation_record import claims_of, record_after, restoring
from control_plane.allocator.core.claims import Change, Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.api.allocations import AllocationRecord, StoredDemand

PLACES = [a_place(f"msb{1 + i % 2}", f"dc{1 + i // 2}", f"rack{r}") for i in range(4) for r in "12"]
CAPACITIES = [
    a_capacity("small"),
    a_capacity("small", memory_bytes=6 << 30, rru=5.3),
    a_capacity("large", rru=11.1, gpus=1),
]
MACHINES = st.lists(
    st.tuples(
        st.sampled_from([f"m{i}" for i in range(12)]),
        st.sampled_from(CAPACITIES),
        st.sampled_from(PLACES),
        st.sampled_from([FREE, "e1", "e2"]),
        st.sampled_from(["", "", "is down"]),
    ),
    max_size=30,
)
DEMANDS = st.builds(
    Demand,
    memory_bytes=st.integers(0, 1 << 30),
    cpus=st.sampled_from([0.0, 0.3, 2.5]),
    rru=st.sampled_from([0.0, 0.7]),
    gpus=st.sampled_from([0, 1]),
    network_mbps=st.sampled_from([0, 5]),
)
ROOMY = {"memory_bytes": 64 << 30, "rru": 100.0, "cpus": 100.0, "gpus": 20, "network_mbps": 100}
TASKS = st.lists(st.none() | st.sampled_from([f"m{i}" for i in range(4)]), max_size=12)


def everything(index: RegionIndex) -> object:
    """Return the content of an index, including space classes and sums."""
    check(index)
    sizes = {
        (pool.name, key): (b.size, b.most_memory, len(set(b.machines())))
        for pool in index.pools.values()
        for key, b in pool.buckets.items()
    }
    by_class = {
        m.name: (m.space_class, m.bucket.capacity.machine_type, m.bucket.place.msb)
        for m in index.machines.values()
    }
    claims = {
        job: ([m and m.name for m in c.machines], c.demand, c._others, c.pool)
        for job, c in index.claims.items()
    }
    return state(index), sizes, by_class, claims


def an_index() -> RegionIndex:
    """Return an index with a task, and with a machine that is being taken."""
    index = RegionIndex()
    (busy,) = add(index, "m0", pool="e1")
    (free,) = add(index, "m1", pool=FREE)
    index.restore("web", "e1", [Claim(0, busy, Demand(memory_bytes=5, cpus=0.3))])
    assert index.reserve(Change("web", "e1", takes=[free])) == ()
    return index


@given(MACHINES, st.booleans())
def test_machines_put_together_are_as_if_put_one_by_one(machines, into_one_in_use: bool) -> None:
    one, many = (an_index() if into_one_in_use else RegionIndex() for _ in range(2))
    for machine in machines:
        one.put(*machine)
    before = gains(many)
    many.put_many(machines)
    assert everything(one) == everything(many)
    new = [m for m in machines if not m[4] and not into_one_in_use]
    assert not new or gains(many) > before
    assert [c.valid for c in one.claims.values()] == [c.valid for c in many.claims.values()]


@given(st.lists(st.tuples(TASKS, DEMANDS), max_size=3), st.integers(1, 5))
def test_tasks_that_claim_the_same_are_restored_as_if_one_by_one(jobs, step: int) -> None:
    one, many = RegionIndex(), RegionIndex()
    for index in (one, many):
        add(index, "m0 m1", pool=POOL, **ROOMY)
        add(index, "m2 m3", pool=POOL, **(ROOMY | {"rru": 132.5}))
    first = 0
    for names, demand in jobs:  # one job; its later tasks may have other claims
        claims = [
            Claim(first + i, one.machines[name], demand)
            for i, name in enumerate(names)
            if name is not None
        ]
        if claims:
            one.restore("web", POOL, claims)
        for start in range(0, len(names), step):
            some = [name and many.machines[name] for name in names[start : start + step]]
            many.restore_equal("web", POOL, first + start, some, demand)
        first += len(names)
    assert everything(one) == everything(many)


@given(TASKS, st.lists(DEMANDS, min_size=1, max_size=3), st.integers(0, 4), st.integers(1, 5))
def test_a_stored_allocation_is_restored_whole_whatever_the_step(
    names, demands, ported: int, step: int
) -> None:
    record = AllocationRecord(
        schema=1,
        job="web",
        pool=POOL,
        machines=[name or "" for name in names],
        demands=[
            StoredDemand(memory_bytes=d.memory_bytes, cpus=d.cpus, rru=d.rru, gpus=d.gpus)
            for d in demands
        ],
        demand_of=[i % len(demands) for i in range(len(names))] if len(demands) > 1 else [],
        ports={i: {"http": 20_000 + i} for i, name in enumerate(names) if name and i < ported},
    )
    whole, stepped = RegionIndex(), RegionIndex()
    for index in (whole, stepped):
        add(index, "m0 m1 m2", pool=POOL, **ROOMY)  # m3 has left the region
    if claims := claims_of(record, whole.machines):
        whole.restore("web", POOL, claims)
    checked = list(restoring(record, stepped, step))
    assert max(checked, default=0) <= step
    assert everything(whole) == everything(stepped)
    again = record_after(Change("web", POOL), stepped.claims.get("web"))
    assert again == record_after(Change("web", POOL), whole.claims.get("web"))


def test_machines_of_which_one_cannot_be_made_leave_no_trace() -> None:
    def fails():
        yield "m0", CAPACITIES[0], PLACES[0], POOL, ""
        raise ConnectionError

    index = RegionIndex()
    with pytest.raises(ConnectionError):
        index.put_many(fails())
    assert everything(index) == everything(RegionIndex())
