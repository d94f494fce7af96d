"""Preferences work in regions of any size, in the order in which they are listed."""

from collections import Counter

import pytest
from regions import (
    FREE,
    GIB,
    TASK,
    Allowance,
    RegionIndex,
    a_request,
    add,
    allocate,
    check,
    plan,
    where,
)

from control_plane.allocator.core.demand import Demand
from control_plane.api.policy import Fit, Preference, Property, Strategy

EVEN, PACK, PREFER, AVOID = Strategy.EVEN, Strategy.PACK, Strategy.PREFER, Strategy.AVOID
SIZES = [1, 63, 64, 65, 255, 256, 257, 1000]
"""Region sizes around every limit at which a planner of this project ever stopped searching."""


def by(property_: Property, strategy: Strategy = EVEN, *values: str, **fields) -> Preference:
    return Preference(property=property_, strategy=strategy, values=list(values), **fields)


def racks(number: int, each: int, msb: str = "msb1", pool: str = "e1", **fields) -> RegionIndex:
    index = RegionIndex()
    for rack in range(number):
        names = [f"{msb}-r{rack}-{i}" for i in range(each)]
        add(index, names, msb, rack=f"r{rack}", pool=pool, **fields)
    return index


def per_rack(index: RegionIndex, tasks: int, *preferences: Preference, **fields) -> Counter[str]:
    made = allocate(index, a_request(tasks, preferences=preferences, **fields), Allowance())
    check(index)
    assert not made.unplaced
    return Counter(claim.machine.place.rack.rpartition("/")[2] for claim in index.claims["web"])


@pytest.mark.behaviour("BUG-AL3")
@pytest.mark.parametrize("each", SIZES)
@pytest.mark.parametrize("pool", ["e1", FREE])
def test_even_over_racks_is_even_however_many_machines_they_have(each, pool):
    """With two racks of a hundred machines, all ten tasks went into one rack."""
    assert set(per_rack(racks(2, each, pool=pool), 4, by(Property.RACK)).values()) == {2}
    assert set(per_rack(racks(3, each, pool=pool), 3, by(Property.RACK)).values()) == {1}


@pytest.mark.behaviour("BUG-AL3")
def test_five_hundred_tasks_are_spread_evenly_over_ten_racks_of_a_thousand_machines():
    assert set(per_rack(racks(10, 1000), 500, by(Property.RACK)).values()) == {50}


@pytest.mark.behaviour("BUG-AL3")
@pytest.mark.parametrize("each", SIZES)
def test_the_rack_that_is_preferred_gets_the_tasks(each):
    """The first rack got the tasks."""
    found = per_rack(racks(4, each), 3, by(Property.RACK, PREFER, "r3", "r2"))
    assert found == {"r3": 3}
    index = racks(4, each)
    avoided = by(Property.RACK, AVOID, "r0", "r1", "r2")
    assert per_rack(index, 3, avoided) == {"r3": 3}


@pytest.mark.behaviour("BUG-AL3")
@pytest.mark.parametrize("each", SIZES)
def test_one_rack_is_filled_before_the_next(each):
    index = racks(3, each)
    assert sorted(per_rack(index, 3, by(Property.RACK, PACK)).values()) == [3]
    assert sorted(per_rack(index, 4 * each + 1, by(Property.RACK, PACK)).values()) == [1, 4 * each]


@pytest.mark.behaviour("BUG-AL3")
@pytest.mark.parametrize("each", SIZES)
def test_the_machine_that_is_preferred_gets_the_task(each):
    """The planner did not see machines beyond the first 64."""
    last = f"msb1-r2-{each - 1}"
    index = racks(3, each)
    preference = by(Property.MACHINE, PREFER, last)
    allocate(index, a_request(5, preferences=(preference,)))
    found = Counter(claim.machine.name for claim in index.claims["web"])
    assert found[last] == 4  # it has no room for more
    index = racks(3, each, pool=FREE)
    made = plan(index, a_request(1, preferences=(preference,)), Allowance())
    assert [machine.name for machine in made.change.takes] == [last]


@pytest.mark.behaviour("BUG-AL3")
@pytest.mark.parametrize("each", [1, 63, 64, 65, 300])
def test_rows_are_bins_as_racks_are(each):
    index = RegionIndex()
    for row in range(3):
        add(index, [f"row{row}-{i}" for i in range(each)], row=f"row{row}")
    allocate(index, a_request(6, preferences=(by(Property.ROW),)))
    rows = Counter(claim.machine.place.row for claim in index.claims["web"])
    assert set(rows.values()) == {2}


def two_msbs(each: int) -> RegionIndex:
    index = racks(2, each)
    for rack in range(2):
        names = [f"msb2-s{rack}-{i}" for i in range(each)]
        add(index, names, "msb2", rack=f"s{rack}")
    return index


@pytest.mark.behaviour("BUG-AL4")
@pytest.mark.parametrize("each", [3, 64, 65, 300])
def test_the_first_preference_matters_most_for_every_property(each):
    """A preference for the rack before the MSB put two of three tasks into the other MSB."""
    rack_first = by(Property.RACK, PREFER, "r1"), by(Property.MSB)
    assert per_rack(two_msbs(each), 3, *rack_first) == {"r1": 3}
    msb_first = by(Property.MSB), by(Property.RACK, PREFER, "r1")
    found = per_rack(two_msbs(each), 4, *msb_first)
    assert found["r1"] == 2
    assert found["s0"] + found["s1"] == 2


@pytest.mark.behaviour("BUG-AL4")
@pytest.mark.parametrize("each", [1, 65])
def test_the_second_preference_decides_between_equals_of_the_first(each):
    avoid_then_rack = by(Property.RACK, AVOID, "r0", "s0"), by(Property.MSB), by(Property.RACK)
    assert per_rack(two_msbs(each), 2, *avoid_then_rack) == {"r1": 1, "s1": 1}
    machine_then_msb = by(Property.MACHINE), by(Property.MSB, PREFER, "msb2")
    found = per_rack(two_msbs(each), 2 * each + 1, *machine_then_msb)
    assert found["s0"] + found["s1"] == 2 * each
    msb_then_machine = by(Property.MSB, PREFER, "msb2"), by(Property.MACHINE)
    found = per_rack(two_msbs(each), 2 * each + 1, *msb_then_machine)
    assert found["s0"] + found["s1"] == 2 * each + 1


@pytest.mark.behaviour("BUG-AL3")
def test_a_machine_with_room_is_found_behind_any_number_without():
    """After 256 machines without room, the planner took the next MSB."""
    index = racks(1, 2000, memory_bytes=GIB // 2)
    add(index, "last", rack="r0", memory_bytes=GIB)
    add(index, [f"msb2-{i}" for i in range(3)], "msb2")
    allocate(index, a_request(2, preferences=(by(Property.MSB),)))
    assert {claim.machine.place.msb for claim in index.claims["web"]} == {"dc1/msb1", "dc1/msb2"}


def test_a_limit_per_machine_holds_with_any_other_preference():
    index = two_msbs(2)
    limit = by(Property.MACHINE, EVEN, at_most=1)
    made = plan(index, a_request(20, preferences=(by(Property.RACK), limit)), Allowance())
    assert len(made.change.claims) == 8
    assert "8 machines: machine would get 2 tasks > 1" in made.reasons


# -- choice between equal machines


def loaded(index: RegionIndex, **tasks: int) -> RegionIndex:
    for name, number in tasks.items():
        demand = Demand(GIB // 4, cpus=0.25, requires=((Property.MACHINE, frozenset({name})),))
        allocate(index, a_request(number, f"load-{name}", demand=demand))
    return index


@pytest.mark.parametrize("fit", Fit)
def test_one_task_jobs_are_packed_if_they_ask_for_it(fit):
    index = RegionIndex()
    add(index, [f"m{i}" for i in range(40)])
    for number in range(80):
        allocate(index, a_request(1, f"j{number}", fit=fit))
    used = sum(1 for machine in index.machines.values() if machine.jobs)
    assert used == (20 if fit is Fit.TIGHT else 40)
    check(index)


def test_the_tightest_machine_has_the_least_of_its_scarcest_resource():
    index = RegionIndex()
    add(index, "a b c d e")
    loaded(index, a=3, b=9, c=10, d=1)  # of 16: b and c each have room for one more task
    allocate(index, a_request(1, fit=Fit.TIGHT))
    assert index.claims["web"].machines[0] is index.machines["c"]
    allocate(index, a_request(1, "next", fit=Fit.TIGHT))
    assert index.claims["next"].machines[0] is index.machines["b"]
    allocate(index, a_request(1, "even"))
    assert index.claims["even"].machines[0] is index.machines["e"]


def test_a_tight_job_is_spread_as_its_preferences_say_all_the_same():
    index = two_msbs(3)
    allocate(index, a_request(8, fit=Fit.TIGHT))
    msbs = Counter(claim.machine.place.msb for claim in index.claims["web"])
    machines = {claim.machine.name for claim in index.claims["web"]}
    assert (set(msbs.values()), len(machines)) == ({4}, 2)


def test_a_tight_job_takes_no_second_machine_while_the_first_has_room():
    index = RegionIndex()
    add(index, [f"f{i}" for i in range(9)], pool=FREE)
    made = plan(index, a_request(6, fit=Fit.TIGHT), Allowance())
    assert len(made.change.takes) == 2
    assert len(plan(index, a_request(4), Allowance()).change.takes) == 1


# -- scarce dimensions


def with_gpus(cpu_machines: int = 4, gpu_machines: int = 4, pool: str = "e1") -> RegionIndex:
    index = RegionIndex()
    add(index, [f"g{i}" for i in range(gpu_machines)], machine_type="gpu", gpus=8, pool=pool)
    add(index, [f"c{i}" for i in range(cpu_machines)], machine_type="cpu", pool=pool)
    return index


@pytest.mark.behaviour("BUG-AL8")
@pytest.mark.parametrize("pool", ["e1", FREE])
def test_machines_with_gpus_are_kept_for_tasks_that_need_gpus(pool):
    """Tasks without a GPU filled the machines with GPUs."""
    index = with_gpus(pool=pool)
    made = allocate(index, a_request(16), Allowance())
    assert not made.unplaced
    assert {claim.machine.capacity.machine_type for claim in index.claims["web"]} == {"cpu"}
    allocate(index, a_request(20), Allowance())  # they are used if no other machine has room
    kinds = Counter(claim.machine.capacity.machine_type for claim in index.claims["web"])
    assert kinds == {"cpu": 16, "gpu": 4}


@pytest.mark.behaviour("BUG-AL8")
@pytest.mark.parametrize(
    ("plenty", "scarce"),
    [
        ({"memory_bytes": 4 * GIB}, {"memory_bytes": 64 * GIB}),
        ({"network_mbps": 1000}, {"network_mbps": 100_000}),
        ({"gpus": 0}, {"gpus": 1}),
    ],
)
def test_every_scarce_resource_is_kept(plenty, scarce):
    index = RegionIndex()
    add(index, ["a"], machine_type="rare", **scarce)
    add(index, ["b"], machine_type="common", **plenty)
    for number in range(3):
        allocate(index, a_request(1, f"j{number}"))
        assert where(index, f"j{number}") == {0: "b"}


@pytest.mark.behaviour("BUG-AL8")
def test_tasks_without_gpus_on_machines_with_some_fill_one_before_the_next():
    """Otherwise every such machine would lack the CPU for its GPUs."""
    index = with_gpus(cpu_machines=0)
    for number in range(8):
        allocate(index, a_request(1, f"j{number}"))
    untouched = [machine for machine in index.machines.values() if not machine.jobs]
    assert len(untouched) == 2


@pytest.mark.behaviour("BUG-AL8")
def test_tasks_with_gpus_go_where_fewest_are_left():
    index = with_gpus()
    small = Demand(GIB // 8, cpus=0.125, gpus=1)
    for number in range(12):
        allocate(index, a_request(1, f"j{number}", demand=small))
    left = sorted(m.free_gpus for m in index.machines.values() if m.capacity.gpus)
    assert left == [0, 4, 8, 8]
    whole = Demand(GIB, cpus=1, gpus=8)
    assert not plan(index, a_request(2, demand=whole), Allowance()).unplaced


@pytest.mark.behaviour("AL8")
def test_spread_comes_before_saving_scarce_machines():
    index = RegionIndex()
    add(index, "c1 c2 c3 c4", "msb1", machine_type="cpu")
    add(index, "g1 g2", "msb2", machine_type="gpu", gpus=8)
    allocate(index, a_request(4, demand=TASK))
    msbs = Counter(claim.machine.place.msb for claim in index.claims["web"])
    assert set(msbs.values()) == {2}


@pytest.mark.behaviour("BUG-AL8")
def test_machines_with_far_more_memory_than_most_are_filled_one_by_one():
    """With even load, no such machine had room for a task that needs a whole one."""
    index = RegionIndex()
    add(index, [f"c{i}" for i in range(30)], machine_type="common")
    add(index, [f"h{i}" for i in range(3)], machine_type="huge", memory_bytes=64 * GIB)
    for number in range(6):
        allocate(index, a_request(1, f"j{number}", demand=Demand(8 * GIB, cpus=0.5)))
    whole = Demand(64 * GIB, cpus=4)
    assert not plan(index, a_request(2, demand=whole), Allowance()).unplaced
    allocate(index, a_request(9, "web"))
    assert {claim.machine.name[0] for claim in index.claims["web"]} == {"c"}
