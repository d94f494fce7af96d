"""Soft preferences: every strategy over every kind of property, limits, and their order."""

from collections import Counter

import pytest
from regions import (
    FREE,
    GIB,
    TASK,
    Allowance,
    RegionIndex,
    a_region,
    a_request,
    add,
    allocate,
    check,
    per,
    plan,
    where,
)

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.preferences import DEFAULT, SCORES
from control_plane.api.policy import Preference, Property, Strategy

EVEN, PACK, PREFER, AVOID = Strategy.EVEN, Strategy.PACK, Strategy.PREFER, Strategy.AVOID


def by(property_: Property, strategy: Strategy = EVEN, *values: str, **fields) -> Preference:
    return Preference(property=property_, strategy=strategy, values=list(values), **fields)


def placed(index: RegionIndex, tasks, *preferences: Preference, **fields) -> Counter[str]:
    """Allocate, and return the tasks per machine."""
    allocate(index, a_request(tasks, preferences=preferences, **fields), Allowance(machines=0))
    check(index)
    return Counter(where(index).values())


def test_every_strategy_has_a_score():
    assert set(SCORES) == set(Strategy)


@pytest.mark.behaviour("AL7", "AL8")
def test_by_default_tasks_go_evenly_over_msbs_and_then_data_centers():
    index = a_region(datacenters=2, msbs=3)
    assert per_msb(index, 10, *DEFAULT) == [1, 1, 2, 2, 2, 2]
    assert per(index, "datacenter") == [5, 5]


def per_msb(index: RegionIndex, tasks, *preferences, **fields) -> list[int]:
    placed(index, tasks, *preferences, **fields)
    return per(index, "msb")


@pytest.mark.behaviour("AL8")
def test_between_equal_msbs_the_emptier_data_center_wins():
    index = RegionIndex()
    for name, msb, dc in (("a", "1", "dc1"), ("b", "2", "dc1"), ("c", "1", "dc2")):
        add(index, name, msb, dc)
    allocate(index, a_request([0], demand=only("a")))
    allocate(index, a_request([0, 1]))
    assert where(index)[1] == "c"


def only(*machines: str, **fields) -> Demand:
    return Demand(GIB, cpus=1, requires=((Property.MACHINE, frozenset(machines)),), **fields)


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("level", ["datacenter", "msb", "row", "rack", "machine"])
def test_even_holds_on_every_level(level):
    index = RegionIndex()
    for dc in ("dc1", "dc2"):
        for msb in ("msb1", "msb2"):
            for row in ("row1", "row2"):
                for rack in ("rack1", "rack2"):
                    name = f"{dc}{msb}{row}{rack}"
                    add(index, [f"{name}a", f"{name}b"], msb, dc, rack=rack, row=row)
    for tasks in (7, 13, 45):
        placed(index, tasks, by(Property(level)))
        counts = per(index, level)
        assert sum(counts) == tasks
        if level in ("datacenter", "msb", "machine"):
            assert counts[-1] - counts[0] <= 1
    placed(index, 0)
    pinned = Demand(GIB, cpus=1, requires=((Property.MSB, frozenset({"dc1/msb1"})),))
    placed(index, 7, by(Property(level)), demand=pinned)
    inside = [n for n in per(index, level) if n]
    assert inside[-1] - inside[0] <= 1


def test_even_over_racks_counts_tasks_that_are_placed_already():
    index = RegionIndex()
    add(index, "a1 a2", rack="a")
    add(index, "b1", rack="b")
    found = placed(index, 4, by(Property.RACK))
    assert found["b1"] == found["a1"] + found["a2"] == 2
    found = placed(index, 6, by(Property.RACK))
    assert found["b1"] == 3


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize(
    ("level", "parts"), [("machine", 2), ("rack", 1), ("row", 1), ("msb", 1), ("datacenter", 1)]
)
def test_pack_fills_one_bin_before_the_next(level, parts):
    index = RegionIndex()
    for dc in ("dc1", "dc2"):
        for msb in ("msb1", "msb2"):
            for rack in ("rack1", "rack2"):
                name = f"{dc}{msb}{rack}"
                add(index, [f"{name}a", f"{name}b"], msb, dc, rack=rack, row=rack)
    placed(index, 7, by(Property(level), PACK))
    assert sum(1 for n in per(index, level) if n) == parts
    for tasks in (8, 6, 8):
        placed(index, tasks, by(Property(level), PACK))
        assert sum(1 for n in per(index, level) if n) == parts


def test_pack_by_machine_grows_where_the_job_is_and_else_on_the_fullest():
    index = a_region(msbs=1, machines=4)
    allocate(index, a_request(3, "other", demand=only("dc1-msb1-2")))
    assert placed(index, 1, by(Property.MACHINE, PACK)) == {"dc1-msb1-2": 1}
    allocate(index, a_request(2, "other", demand=only("dc1-msb1-2")))
    allocate(index, a_request(3, "third", demand=only("dc1-msb1-3")))
    assert placed(index, 2, by(Property.MACHINE, PACK)) == {"dc1-msb1-2": 2}


def test_prefer_follows_the_order_of_its_values():
    index = a_region(msbs=4, machines=1)
    preference = by(Property.MSB, PREFER, "dc1/msb3", "msb2")
    assert placed(index, 6, preference) == {"dc1-msb3-0": 4, "dc1-msb2-0": 2}
    assert sum(placed(index, 12, preference).values()) == 12


def test_avoid_uses_its_bins_only_as_a_last_resort():
    index = a_region(msbs=3, machines=1)
    preference = by(Property.MSB, AVOID, "msb1", "msb3")
    assert placed(index, 4, preference) == {"dc1-msb2-0": 4}
    assert placed(index, 9, preference)["dc1-msb2-0"] == 4


@pytest.mark.behaviour("AL23")
@pytest.mark.parametrize(
    ("property_", "field"),
    [
        (Property.MACHINE_TYPE, "machine_type"),
        (Property.GENERATION, "generation"),
        (Property.SKU, "sku"),
        (Property.GPU_TYPE, "gpu_type"),
    ],
)
def test_hardware_can_be_preferred_and_avoided(property_, field):
    for strategy, expected in ((PREFER, "new"), (AVOID, "old")):
        index = RegionIndex()
        add(index, "old", **{field: "old"})
        add(index, "new", **{field: "new"})
        assert placed(index, 4, by(property_, strategy, "new")) == {expected: 4}
        assert placed(index, 5, by(property_, strategy, "new"))[expected] == 4


@pytest.mark.parametrize(
    ("property_", "value"),
    [(Property.MACHINE, "m7"), (Property.RACK, "rack7"), (Property.ROW, "row7")],
)
def test_single_machines_can_be_preferred_and_avoided(property_, value):
    for strategy, expected in ((PREFER, True), (AVOID, False)):
        for pool in ("e1", FREE):
            index = RegionIndex()
            for i in range(10):
                add(index, f"m{i}", rack=f"rack{i}", row=f"row{i}", pool=pool)
            request = a_request(1, preferences=(by(property_, strategy, value),))
            allocate(index, request, Allowance())
            assert (where(index)[0] == "m7") == expected


@pytest.mark.behaviour("AL10")
def test_machines_taken_from_the_free_pool_are_spread_over_racks():
    index = RegionIndex()
    for rack in ("a", "b", "c"):
        add(index, f"{rack}1 {rack}2 {rack}3", rack=rack, pool=FREE)
    allocate(index, a_request(3, preferences=(by(Property.RACK),), demand=BIG), Allowance())
    assert per(index, "rack") == [1, 1, 1]


BIG = Demand(3 * GIB, cpus=1)


@pytest.mark.behaviour("AL7")
def test_several_preferences_matter_in_their_order():
    index = RegionIndex()
    for msb in ("msb1", "msb2"):
        add(index, f"{msb}-old", msb, generation="old")
        add(index, f"{msb}-new", msb, generation="new")
    spread_first = by(Property.MSB), by(Property.GENERATION, PREFER, "new")
    assert placed(index, 4, *spread_first) == {"msb1-new": 2, "msb2-new": 2}
    assert placed(index, 10, *spread_first) == {
        "msb1-new": 4,
        "msb2-new": 4,
        "msb1-old": 1,
        "msb2-old": 1,
    }
    placed(index, 0)
    assert set(placed(index, 4, by(Property.GENERATION, AVOID, "old"), by(Property.MSB))) == {
        "msb1-new",
        "msb2-new",
    }


def test_even_over_data_centers_before_msbs():
    index = a_region(datacenters=1, msbs=3, machines=2)
    add(index, "far1 far2", "msb1", "dc2")
    placed(index, 6, by(Property.DATACENTER), by(Property.MSB))
    assert per(index, "datacenter") == [3, 3]
    assert per(index, "msb") == [1, 1, 1, 3]


def test_pack_by_data_center_and_spread_within():
    index = a_region(datacenters=2, msbs=3, machines=1)
    placed(index, 9, by(Property.DATACENTER, PACK), by(Property.MSB))
    assert per(index, "datacenter") == [0, 9]
    assert per(index, "msb") == [0, 0, 0, 3, 3, 3]


def test_three_preferences_over_shared_properties():
    index = RegionIndex()
    for dc in ("dc1", "dc2"):
        for msb in ("msb1", "msb2"):
            for generation in ("old", "new"):
                add(index, f"{dc}{msb}{generation}", msb, dc, generation=generation)
    preferences = by(Property.MSB), by(Property.DATACENTER), by(Property.GENERATION, PREFER, "new")
    assert all(name.endswith("new") for name in placed(index, 8, *preferences))
    assert per(index, "msb") == [2, 2, 2, 2]


# -- at_most


@pytest.mark.parametrize("level", ["datacenter", "msb", "row", "rack", "machine"])
@pytest.mark.parametrize("strategy", [EVEN, PACK])
@pytest.mark.parametrize("pool", ["e1", FREE])
def test_no_bin_gets_more_than_at_most(level, strategy, pool):
    index = RegionIndex()
    for dc in ("dc1", "dc2"):
        for msb in ("msb1", "msb2"):
            for rack in ("rack1", "rack2"):
                name = f"{dc}{msb}{rack}"
                add(index, [f"{name}a", f"{name}b"], msb, dc, pool, rack=rack, row=rack)
    preference = by(Property(level), strategy, at_most=2)
    bins = len(per(index, level))
    made = plan(index, a_request(40, preferences=(preference,)), Allowance())
    assert len(made.change.claims) == 2 * bins
    assert index.reserve(made.change) == ()
    index.settle(made.change)
    assert per(index, level) == [2] * bins
    assert any(f"{level} would get 3 tasks > 2" in reason for reason in made.reasons)
    check(index)


def test_distinct_hosts_get_one_task_each():
    index = a_region(msbs=2, machines=3)
    preferences = (by(Property.MACHINE, at_most=1), *DEFAULT)
    made = allocate(index, a_request(8, preferences=preferences))
    assert per(index, "machine") == [1] * 6
    assert made.unplaced == (6, 7)
    assert made.reasons == (
        "6 machines: machine would get 2 tasks > 1",
        "the free pool is empty",
    )
    add(index, "free", "msb3", pool=FREE)
    grown = allocate(index, a_request(8, preferences=preferences), Allowance(machines=1))
    assert grown.unplaced == (7,)
    assert per(index, "machine") == [1] * 7


def test_a_limit_counts_the_tasks_that_stay():
    index = a_region(msbs=2, machines=2)
    allocate(index, a_request(2, demand=only("dc1-msb1-0", "dc1-msb1-1")))
    preferences = (by(Property.MSB, at_most=3),)
    allocate(index, a_request(8, preferences=preferences))
    assert per(index, "msb") == [3, 3]


def test_limits_of_several_preferences_hold_together():
    index = a_region(msbs=3, machines=3)
    preferences = by(Property.MSB, at_most=4), by(Property.MACHINE, at_most=1)
    made = allocate(index, a_request(20, preferences=preferences))
    assert len(made.unplaced) == 11
    preferences = by(Property.MSB, at_most=2), by(Property.MACHINE, at_most=2)
    made = allocate(index, a_request(20, "other", preferences=preferences))
    assert len(made.unplaced) == 14
    assert per(index, "msb", "other") == [2, 2, 2]


def test_tasks_fit_where_the_machine_of_the_better_bin_is_full():
    index = a_region(msbs=2, machines=1)
    allocate(index, a_request(4, "other", demand=only("dc1-msb1-0")))
    assert placed(index, 3, *DEFAULT) == {"dc1-msb2-0": 3}
    assert TASK.memory_bytes == GIB
