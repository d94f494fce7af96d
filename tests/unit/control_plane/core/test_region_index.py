"""The index: reserve, settle and roll back changes, and apply changes of machines."""

from dataclasses import replace

import pytest
from regions import (
    FREE,
    GIB,
    POOL,
    TASK,
    Allowance,
    Group,
    RegionIndex,
    Request,
    a_capacity,
    a_place,
    a_region,
    a_request,
    add,
    allocate,
    check,
    gains,
    per,
    plan,
    settle,
    state,
    where,
)

from control_plane.allocator.core.claims import Change, Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.machine_pools import Bucket
from control_plane.api.policy import Property

BIG = Demand(memory_bytes=3 * GIB, cpus=1.0)


# -- machines that fit


@pytest.mark.behaviour("AL6", "AL5")
def test_hard_requirements_are_answered_over_all_machines():
    """The query covers all Skylake machines with available CPU >= 2 RRU and memory >= 5 GB."""
    index = RegionIndex()
    offers = {"skylake": "skylake", "icelake": "icelake"}
    for pool in (FREE, "e1", "e2"):
        for kind, generation in offers.items():
            add(index, f"{pool}{kind}", pool=pool, generation=generation, memory_bytes=8 * GIB)
        add(index, f"{pool}little", pool=pool, generation="skylake", memory_bytes=4 * GIB)
        add(index, f"{pool}slow", pool=pool, generation="skylake", rru=1.0, memory_bytes=8 * GIB)
        add(index, f"{pool}down", pool=pool, generation="skylake", blocked="is down")
    wanted = Demand(5 * GIB, rru=2, requires=((Property.GENERATION, frozenset({"skylake"})),))
    assert sorted(m.name for m in index.fitting(wanted)) == ["e1skylake", "e2skylake", "skylake"]
    assert [m.name for m in index.fitting(wanted, ["e1", "nowhere"])] == ["e1skylake"]
    assert "nowhere" not in index.pools
    allocate(index, a_request(1, pool="e1", demand=wanted))
    allocate(index, a_request(1, "other", "e1", demand=Demand(rru=1)))
    assert [m.name for m in index.fitting(wanted, ["e1"])] == []


def test_the_kinds_of_the_region_are_known_by_msb():
    """Kinds change with the types and places of machines, not with their owners."""

    def kinds():
        return sorted((m.place.msb, m.capacity.machine_type) for m in index.kinds())

    index = RegionIndex()
    add(index, ["a", "b"], "msb1", pool="e1")
    add(index, "c", "msb2")
    assert kinds() == [("dc1/msb1", "small"), ("dc1/msb2", "small")]
    add(index, "a", "msb1", pool=FREE, blocked="is down")
    assert len(kinds()) == 2
    add(index, "c", "msb2", machine_type="rare")
    assert kinds() == [("dc1/msb1", "small"), ("dc1/msb2", "rare")]
    add(index, "c", "msb1")
    assert kinds() == [("dc1/msb1", "small")]
    for name in "abc":
        index.remove(name)
    assert kinds() == []


@pytest.mark.behaviour("AL6")
def test_buckets_that_a_requirement_excludes_are_passed_over(monkeypatch):
    index = a_region(datacenters=2, msbs=3)
    seen = []
    usable = Bucket.usable

    def watched(bucket, *wanted, **fields):
        seen.append(bucket.place.msb)
        return usable(bucket, *wanted, **fields)

    monkeypatch.setattr(Bucket, "usable", watched)
    wanted = Demand(GIB, requires=((Property.MSB, frozenset({"dc2/msb3"})),))
    assert len(list(index.fitting(wanted))) == 2
    assert set(seen) == {"dc2/msb3"}
    seen.clear()
    plan(index, a_request(2, demand=wanted), Allowance(machines=0))
    assert set(seen) == {"dc2/msb3"}


# -- reserve, settle, roll back


@pytest.mark.behaviour("AL4")
def test_free_and_allocate_are_one_change():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(4, "old"))
    made = plan(index, Request("old", POOL, (Group(TASK, (0, 7)),)), Allowance(machines=0))
    assert [c.task for c in made.change.freed] == [1, 2, 3]
    assert [c.task for c in made.change.claims] == [7]
    settle(index, made)
    assert where(index, "old") == dict.fromkeys((0, 7), "dc1-msb1-0")
    check(index)


@pytest.mark.behaviour("AL4")
def test_a_change_uses_the_room_that_it_frees_on_a_full_machine():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(2))
    allocate(index, a_request(2, "other"))
    grown = a_request(1, demand=Demand(2 * GIB, cpus=2))
    made = plan(index, grown, Allowance(machines=0))
    assert made.unplaced == ()
    assert index.reserve(made.change) == ()
    assert not list(index.fitting(TASK))
    assert plan(index, a_request(1, "third"), Allowance(machines=0)).unplaced == (0,)
    index.settle(made.change)
    check(index)
    assert index.machines["dc1-msb1-0"].free_memory == 0


def test_disk_and_parts_of_gpus_are_freed_and_used_by_one_change():
    index = a_region(msbs=1, machines=1, gpus=2, disk_bytes=8 * GIB)
    half = Demand(GIB, gpus=0.5, disk_bytes=2 * GIB)
    allocate(index, a_request(2, demand=half))
    allocate(index, a_request(2, "other", demand=half))
    (machine,) = index.machines.values()
    assert (machine.free_gpus, machine.free_disk) == (0, 0)
    assert plan(index, a_request(1, "third", demand=Demand(gpus=0.125)), Allowance()).unplaced
    assert plan(index, a_request(1, "third", demand=Demand(disk_bytes=1)), Allowance()).unplaced
    grown = plan(index, a_request(1, demand=Demand(GIB, gpus=1, disk_bytes=4 * GIB)), Allowance())
    assert grown.unplaced == ()
    assert index.reserve(grown.change) == ()
    index.rollback(grown.change)
    check(index)
    settle(index, grown)
    check(index)
    assert (machine.free_gpus, machine.free_disk) == (0, 0)
    allocate(index, a_request(0))
    assert (machine.free_gpus, machine.free_disk) == (1, 4 * GIB)
    check(index)


@pytest.mark.parametrize(
    "more", [{"disk_bytes": 2}, {"gpus": 1}, {"network_mbps": 5}, {"memory_bytes": 2}, {"rru": 0.5}]
)
def test_a_task_that_claims_more_of_any_resource_is_placed_again(more):
    index = a_region(msbs=1, machines=1, gpus=2, disk_bytes=8, network_mbps=10)
    before = Demand(memory_bytes=1, gpus=0.5, network_mbps=1, disk_bytes=1)
    allocate(index, a_request(1, demand=before))
    allocate(index, a_request(1, demand=replace(before, **more)))
    check(index)
    (claim,) = index.claims["web"]
    assert claim.demand == replace(before, **more)


def test_only_the_change_itself_gets_room_that_it_frees_until_it_is_settled():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(4))
    smaller = plan(index, a_request(1), Allowance(machines=0))
    assert index.reserve(smaller.change) == ()
    assert plan(index, a_request(1, "other"), Allowance(machines=0)).unplaced == (0,)
    index.settle(smaller.change)
    assert allocate(index, a_request(3, "other")).unplaced == ()
    check(index)


PORTED = Demand(GIB, cpus=0.1, ports=("http", "admin"))


@pytest.mark.behaviour("AL12")
@pytest.mark.parametrize("cpus", [0.1, 1 / 3, 2.7])
def test_a_rollback_restores_exactly_the_state_before(cpus):
    index = a_region(msbs=3, machines=1)
    add(index, "f1 f2", "msb4", pool=FREE)
    allocate(index, a_request(6, demand=Demand(GIB, cpus=cpus, ports=("http",))))
    allocate(index, a_request(3, "other", demand=Demand(GIB, cpus=0.3)))
    before = state(index)
    request = Request("web", POOL, (Group(Demand(2 * GIB, cpus=cpus), tuple(range(1, 8))),))
    made = plan(index, request, Allowance(machines=2))
    assert made.change.freed
    assert made.change.claims
    assert made.change.takes
    assert index.reserve(made.change) == ()
    assert state(index) != before
    index.rollback(made.change)
    assert state(index) == before
    assert index.reserve(made.change) == ()  # the change can be reserved again
    index.settle(made.change)
    check(index)


def test_a_rollback_of_a_new_job_leaves_no_trace():
    index = a_region()
    before = state(index)
    made = plan(index, a_request(5, demand=PORTED), Allowance(machines=0))
    index.reserve(made.change)
    assert "web" in index.claims
    index.rollback(made.change)
    assert state(index) == before
    assert index.claims == {}


@pytest.mark.behaviour("AL11")
def test_a_reserve_with_conflicts_changes_nothing_and_names_the_machines():
    index = a_region(msbs=2, machines=1)
    one = plan(index, a_request(6), Allowance(machines=0))
    two = plan(index, a_request(6, "other"), Allowance(machines=0))
    settle(index, one)
    before = state(index)
    assert index.reserve(two.change)[0] in index.machines
    assert state(index) == before
    assert len(allocate(index, a_request(6, "other")).unplaced) == 4


@pytest.mark.behaviour("MO9")
def test_a_free_machine_goes_to_one_of_two_that_want_it():
    index = RegionIndex()
    add(index, "m1", pool=FREE)
    one = plan(index, a_request(1), Allowance())
    two = plan(index, a_request(1, "other", "e2"), Allowance())
    assert index.reserve(one.change) == ()
    taken = state(index)
    assert index.reserve(two.change) == ("m1",)
    assert state(index) == taken  # the machine did not return to the free pool
    index.settle(one.change)
    assert index.machines["m1"].pool == POOL
    check(index)


def test_a_machine_that_got_blocked_or_went_meanwhile_is_a_conflict():
    for happen in (
        lambda i: i.block("m1", "is down"),
        lambda i: i.remove("m1"),
        lambda i: i.put("m1", a_capacity(), a_place(), "e2", ""),
        lambda i: i.put("m1", a_capacity(memory_bytes=0), a_place(), POOL, ""),
    ):
        for pool in (POOL, FREE):
            index = RegionIndex()
            add(index, "m1", pool=pool)
            made = plan(index, a_request(1), Allowance())
            assert made.unplaced == ()
            happen(index)
            before = state(index)
            assert index.reserve(made.change) == ("m1",)
            assert state(index) == before
            check(index)


def test_ports_of_two_plans_do_not_meet():
    index = a_region(msbs=1, machines=1)
    one = plan(index, a_request(1, demand=PORTED), Allowance(machines=0))
    two = plan(index, a_request(1, "other", demand=PORTED), Allowance(machines=0))
    settle(index, one)
    assert index.reserve(two.change) == ("dc1-msb1-0",)
    settle(index, plan(index, a_request(1, "other", demand=PORTED), Allowance(machines=0)))
    check(index)


@pytest.mark.behaviour("AL10")
def test_a_settled_change_names_the_machines_that_it_left_empty():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4))
    allocate(index, a_request(1, "other"))
    made = plan(index, a_request([]), Allowance(machines=0))
    index.reserve(made.change)
    emptied = index.settle(made.change)
    kept = where(index, "other")[0]
    assert [m.name for m in emptied] == sorted({"dc1-msb1-0", "dc1-msb2-0"} - {kept})
    assert "web" not in index.claims


@pytest.mark.behaviour("AL17")
def test_a_large_change_is_charged_in_steps_and_others_run_between():
    index = a_region(msbs=2, machines=500)
    made = plan(index, a_request(1500), Allowance(machines=0))
    steps = index.reserving(made.change)
    next(steps)
    assert made.change.charged == 500
    other = plan(index, a_request(100, "other"), Allowance(machines=0))
    assert index.reserve(other.change) == ()
    assert len(list(steps)) == 1
    check(index, [made.change, other.change])
    index.settle(other.change)
    index.settle(made.change)
    check(index)


@pytest.mark.behaviour("AL17")
def test_a_large_job_is_given_back_in_steps():
    index = a_region(msbs=2, machines=200)
    before = state(index)
    allocate(index, a_request(1500))
    made = plan(index, a_request([]), Allowance())
    assert index.reserve(made.change) == ()
    steps = index.settling(made.change)
    next(steps)
    check(index)
    assert allocate(index, a_request(500, "other")).unplaced == ()
    assert len(list(steps)) == 1
    check(index)
    allocate(index, a_request([], "other"))
    assert state(index) == before


def test_a_large_change_that_fails_late_gives_back_all_of_it():
    index = a_region(msbs=1, machines=300)
    before = state(index)
    made = plan(index, a_request(1200), Allowance(machines=0))
    steps = index.reserving(made.change)
    next(steps)
    last = made.change.claims[-1]
    there = replace(last.demand, requires=((Property.MACHINE, frozenset({last.machine.name})),))
    allocate(index, a_request(1, "other", demand=there))
    assert list(steps) == [None]
    allocate(index, a_request([], "other"))
    assert state(index) == before


def test_restored_claims_count_whether_or_not_they_would_fit():
    index = a_region(msbs=1, machines=1)
    machine = index.machines["dc1-msb1-0"]
    claims = [Claim(i, machine, PORTED, {"http": 20_000 + i, "admin": 20_100 + i}) for i in (0, 3)]
    index.restore("web", POOL, claims)
    check(index)
    assert where(index) == {0: machine.name, 3: machine.name}
    assert plan(index, a_request([0, 3], demand=PORTED), Allowance()).change.is_empty


# -- machines change


@pytest.mark.behaviour("AL13")
def test_a_change_of_a_machine_invalidates_its_results():
    for happen in (
        lambda i: i.block("dc1-msb1-0", "is down"),
        lambda i: i.put("dc1-msb1-0", a_capacity(), a_place(), "e2", ""),
        lambda i: i.put("dc1-msb1-0", a_capacity(gpus=1), a_place(), POOL, ""),
        lambda i: i.put("dc1-msb1-0", a_capacity(), a_place("msb9"), POOL, ""),
        lambda i: i.remove("dc1-msb1-0"),
    ):
        index = a_region(msbs=2, machines=1)
        allocate(index, a_request(2))
        allocate(index, a_request(1, "far", demand=Demand(1, requires=((Property.MSB, {"msb2"}),))))
        assert index.claims["web"].valid
        happen(index)
        assert not index.claims["web"].valid
        assert index.claims["far"].valid
        check(index)


@pytest.mark.behaviour("AL13")
def test_unchanged_state_invalidates_nothing():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(2))
    before, gain = state(index), gains(index)
    index.put("dc1-msb1-0", a_capacity(), a_place(), POOL, "")
    index.block("dc1-msb1-0", "")
    index.block("nowhere", "is down")
    allocate(index, a_request(1, "other"))
    settle(index, plan(index, a_request([], "other"), Allowance()))
    assert index.claims["web"].valid
    assert state(index) == before
    assert gains(index) > gain


def test_a_removed_machine_takes_its_claims_along():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4))
    index.remove("dc1-msb1-0")
    index.remove("dc1-msb1-0")
    check(index)
    assert set(where(index).values()) == {"dc1-msb2-0"}
    assert len(index.claims["web"]) == 2
    index.remove("dc1-msb2-0")
    assert index.claims == {}


@pytest.mark.parametrize("end", ["settle", "rollback"])
@pytest.mark.parametrize("back", [True, False])
def test_a_machine_may_go_while_a_change_is_reserved_on_it(end, back):
    index = a_region(msbs=1, machines=3)
    allocate(index, a_request(3))
    made = plan(index, a_request(6, demand=Demand(2 * GIB, cpus=1)), Allowance(machines=0))
    assert index.reserve(made.change) == ()
    index.remove("dc1-msb1-1")
    if back:
        add(index, "dc1-msb1-1")
    getattr(index, end)(made.change)
    check(index)
    assert "dc1-msb1-1" not in where(index).values()


def test_capacity_may_change_under_tasks_settled_or_not():
    index = RegionIndex()
    add(index, "m1", rru=4.0, cpus=4.0)
    allocate(index, a_request(2))
    made = plan(index, a_request(3), Allowance(machines=0))
    assert index.reserve(made.change) == ()
    faster = a_capacity(rru=9.1)
    index.put("m1", faster, a_place(), POOL, "")
    index.settle(made.change)
    check(index)
    settle(index, plan(index, a_request([]), Allowance(machines=0)))
    check(index)
    assert index.machines["m1"].free_cpu == faster.cpu_room


def test_a_bucket_keeps_its_place_when_its_first_machine_moves():
    index = RegionIndex()
    add(index, "first second", "msb1")
    add(index, "third", "msb2")
    add(index, "first", "msb2")
    allocate(index, a_request(2))
    assert per(index, "msb") == [1, 1]


def test_the_gain_rises_whenever_something_may_fit_that_did_not():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(4))
    for happen in (
        lambda: settle(index, plan(index, a_request(3), Allowance())),
        lambda: add(index, "new", pool=FREE),
        lambda: index.block("new", "is down") or index.block("new", ""),
        lambda: index.put("new", a_capacity(cpus=9.0), a_place(), FREE, ""),
        lambda: index.put("new", a_capacity(cpus=9.0), a_place(), "e2", ""),
    ):
        gain = gains(index)
        happen()
        assert gains(index) > gain


@pytest.mark.behaviour("MO6")
def test_a_pool_counts_its_machines_by_type_and_rru():
    index = RegionIndex()
    add(index, "a b", machine_type="small", rru=4.0)
    add(index, "c", machine_type="large", rru=9.5)
    pool = index.pool(POOL)
    assert (pool.size, pool.micro_rru, pool.per_type) == (3, 17_500_000, {"small": 2, "large": 1})
    add(index, "b", pool="e2")
    assert (pool.size, pool.micro_rru, pool.per_type["small"]) == (2, 13_500_000, 1)


# -- searches in vain


def excluded(index: RegionIndex, demand: Demand = BIG) -> bool:
    return all(b.is_no_fit(demand) for b in index.pool(POOL).buckets.values())


def test_a_search_in_vain_is_not_done_again_until_something_changes():
    index = a_region(msbs=2, machines=2)
    allocate(index, a_request(8, demand=Demand(2 * GIB, cpus=0.1)))
    assert not excluded(index)
    plan(index, a_request(1, "big", demand=BIG), Allowance(machines=0))
    assert excluded(index)
    assert not excluded(index, TASK)
    settle(index, plan(index, a_request(3, demand=Demand(2 * GIB, cpus=0.1)), Allowance()))
    assert not excluded(index)
    assert plan(index, a_request(1, "big", demand=BIG), Allowance(machines=0)).unplaced == ()


def test_machines_that_moved_during_a_search_are_not_excluded_from_later_ones():
    """A search may miss a machine that moves to a space class that it has searched already."""
    index = a_region(msbs=1, machines=2)
    bucket = next(iter(index.pool(POOL).buckets.values()))
    gain, moves = bucket.gain, bucket.moves
    index.reserve(plan(index, a_request(2), Allowance(machines=0)).change)
    bucket.note_no_fit(BIG, gain, moves)
    assert not bucket.is_no_fit(BIG)
    bucket.note_no_fit(BIG, bucket.gain, bucket.moves)
    assert bucket.is_no_fit(BIG)


def test_an_empty_change_is_empty():
    assert Change("web", POOL).is_empty
    assert not Change("web", POOL, takes=add(RegionIndex(), "m1")).is_empty
