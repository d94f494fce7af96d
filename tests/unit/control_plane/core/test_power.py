"""Power budgets are overcommitted by default, respected by placement, and explained."""

import random
from collections import Counter

import pytest
from regions import (
    FREE,
    GIB,
    Allowance,
    RegionIndex,
    a_request,
    add,
    allocate,
    check,
    per,
    plan,
    settle,
    where,
)

from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.power import Power
from control_plane.api.policy import Fit, Preference, Property
from control_plane.api.requirements import In
from control_plane.api.settings import PowerSettings

pytestmark = pytest.mark.behaviour("AL22")

MSB1, MSB2 = "dc1/msb1", "dc1/msb2"
RACK = "dc1/msb1/row1/rack1"


def a_region(
    overcommit: float = 1.0, pool: str = "e1", each: int = 4, **budgets: int
) -> RegionIndex:
    """Return two MSBs with machines of 400 W for four tasks each; `_` in a place stands for `/`."""
    placed = {place.replace("_", "/"): watts for place, watts in budgets.items()}
    index = RegionIndex(Power.of(PowerSettings(budgets_w=placed, overcommit=overcommit)))
    for msb in ("msb1", "msb2"):
        add(index, [f"{msb}-{i}" for i in range(each)], msb, pool=pool, power_w=400)
    return index


def used(index: RegionIndex) -> dict[str, int]:
    return {budget.place: budget.used_w for budget in index.power_budgets()}


def drawn(index: RegionIndex, prefix: str = "msb1") -> int:
    return sum(
        m.capacity.power_w for m in index.machines.values() if m.jobs and m.name.startswith(prefix)
    )


@pytest.mark.behaviour("AL22")
def test_without_a_budget_power_keeps_no_task_away():
    index = a_region()
    allocate(index, a_request(32))
    assert len(where(index)) == 32
    assert index.power is None


@pytest.mark.behaviour("AL22")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize(
    ("overcommit", "watts", "powered_on"),
    [(1.0, 1000, 2), (1.25, 1000, 3), (2.0, 1000, 4), (1.0, 399, 0)],
)
def test_machines_in_use_may_draw_more_than_the_budget_as_far_as_it_is_overcommitted(
    pool, overcommit, watts, powered_on
):
    """One machine draws 400 W; `lit` of the four machines in the MSB get tasks."""
    index = a_region(overcommit, pool, dc1_msb1=watts)
    allocate(index, a_request(32), Allowance())
    check(index)
    assert drawn(index) == powered_on * 400
    assert used(index) == {MSB1: powered_on * 400}
    assert per(index, "msb") == sorted([powered_on * 4, 16])


@pytest.mark.behaviour("AL22")
def test_the_default_exceeds_the_nominal_budget():
    assert PowerSettings().overcommit > 1


def test_a_machine_in_use_gets_more_tasks_where_no_other_may_be_used():
    index = a_region(dc1_msb1=400, dc1_msb2=400)
    allocate(index, a_request(2))
    assert per(index, "msb") == [1, 1]
    made = allocate(index, a_request(10, "more"))
    assert len(where(index, "more")) == 6
    assert len(made.unplaced) == 4


@pytest.mark.parametrize(
    "place", ["dc1", "dc1/msb1", "dc1/msb1/row1", "dc1/msb1/row1/rack1"], ids=str
)
def test_every_level_has_budgets_and_all_of_them_hold(place):
    index = RegionIndex(Power(PowerSettings(budgets_w={place: 800, "dc1": 1200}, overcommit=1)))
    for rack in ("rack1", "rack2"):
        add(index, [f"{rack}-{i}" for i in range(4)], rack=rack, power_w=400)
    allocate(index, a_request(32, preferences=(Preference(property=Property.RACK),)))
    powered_on = Counter(name[:5] for name in set(where(index).values()))
    if place == RACK:
        assert powered_on.total() == 3
        assert powered_on["rack1"] <= 2
    else:
        assert powered_on.total() == (3 if place == "dc1" else 2)
    assert all(b.used_w <= b.limit_w for b in index.power_budgets())


@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize("fit", list(Fit))
def test_a_plan_counts_its_own_use(pool, fit):
    index = a_region(pool=pool, dc1_msb1=800, dc1_msb2=400)
    preferences = (Preference(property=Property.MACHINE),) if fit is Fit.EVEN else ()
    made = plan(index, a_request(40, fit=fit, preferences=preferences), Allowance())
    settle(index, made)  # the committer accepts the plan
    assert used(index) == {MSB1: 800, MSB2: 400}
    assert len(where(index)) == 12


def test_lack_of_power_is_explained_with_place_and_watts():
    index = a_region(1.25, dc1_msb1=1000, dc1=1200)
    made = allocate(index, a_request(40))
    assert "power: dc1 has 300 W left of 1500 W; another machine draws 400 W" in " ".join(
        made.reasons
    )
    assert any(reason.startswith("5 machines: power: dc1 has") for reason in made.reasons)
    assert len(where(index)) == 12


def test_free_machines_without_power_are_in_the_reasons():
    index = a_region(pool=FREE, dc1=400)
    made = allocate(index, a_request(5), Allowance())
    assert len(where(index)) == 4
    assert any("free machines: power: dc1 has 0 W left of 400 W" in r for r in made.reasons)


@pytest.mark.behaviour("AL11")
def test_the_committer_checks_again():
    """Each of two plans takes a machine, and the MSB's power allows one: one plan is refused."""
    index = a_region(dc1_msb1=400)
    plans = {}
    for job, name in (("a", "msb1-0"), ("b", "msb1-1")):
        task = Demand(GIB, cpus=1, requires=(In("machine", frozenset({name})),))
        plans[job] = plan(index, a_request(1, job, demand=task), Allowance(machines=0))
    settle(index, plans["a"])
    assert index.reserve(plans["b"].change) == ("msb1-1",)
    assert used(index) == {MSB1: 400}
    allocate(index, a_request(0, "a"))
    settle(index, plan(index, a_request(1, "b"), Allowance(machines=0)))
    check(index)


def test_released_power_wakes_jobs_that_lacked_it():
    """A third pool releases the power. Without the wake-up no waiting job would ask again."""
    index = a_region(dc1_msb1=400, each=1)
    add(index, "other", "msb1", pool="e2", power_w=400)
    allocate(index, a_request(4, "there", pool="e2"))
    index.block("msb2-0", "is down")
    made = allocate(index, a_request(1))
    assert made.unplaced == (0,)
    gains = index.gains("e1")
    allocate(index, a_request(0, "there", pool="e2"))
    assert index.gains("e1") > gains
    assert allocate(index, a_request(1)).unplaced == ()
    assert used(index) == {MSB1: 400}


def test_a_machine_that_draws_less_than_was_known_is_news_too():
    index = a_region(dc1=700, each=1)
    assert len(allocate(index, a_request(8)).unplaced) == 4
    (name,) = set(where(index).values())
    gains = index.gains("e2")
    add(index, name, index.machines[name].place.msb.partition("/")[2], power_w=300)
    assert index.gains("e2") > gains
    assert not allocate(index, a_request(8)).unplaced


def test_released_power_does_not_wake_other_jobs():
    index = a_region(dc1_msb1=4000)
    allocate(index, a_request(4, "there", pool="e1"))
    gains = index.gains("e2")
    allocate(index, a_request(0, "there", pool="e1"))
    assert index.gains("e2") == gains


def test_facts_of_a_machine_change_its_counts():
    index = a_region(dc1_msb1=2000, dc1_msb2=2000, each=1)
    allocate(index, a_request(2))
    assert used(index) == {MSB1: 400, MSB2: 400}
    add(index, "msb1-0", "msb1", power_w=900)
    assert used(index) == {MSB1: 900, MSB2: 400}
    add(index, "msb1-0", "msb2", power_w=900)
    assert used(index) == {MSB1: 0, MSB2: 1300}
    index.remove("msb1-0")
    assert used(index) == {MSB1: 0, MSB2: 400}


def test_running_tasks_are_counted_and_never_refused():
    """A budget may be set below the power in use; no task is stopped for it."""
    index = a_region(dc1_msb1=400)
    machines = [index.machines[f"msb1-{i}"] for i in range(3)]
    index.restore("old", "e1", [Claim(0, machines[0], Demand(GIB, cpus=1))])
    index.restore_equal("older", "e1", 0, machines[1:], Demand(GIB, cpus=1))
    assert used(index) == {MSB1: 1200}
    made = allocate(index, a_request(1, "older", demand=Demand(GIB, cpus=1)))
    assert not made.unplaced
    assert used(index)[MSB1] == 800


def test_a_machine_of_unknown_draw_is_not_counted():
    index = RegionIndex(Power(PowerSettings(budgets_w={"dc1": 1}, overcommit=1)))
    add(index, "m1")
    assert not allocate(index, a_request(1)).unplaced


@pytest.mark.behaviour("AL22")
@pytest.mark.parametrize("seed", range(20))
def test_no_budget_is_exceeded_and_unused_power_does_not_count(seed):
    rng = random.Random(seed)
    pools = ("e1", "e2")
    levels = ["dc1", MSB1, MSB2, RACK]
    budgets = {level: rng.randint(200, 4000) for level in rng.sample(levels, rng.randint(1, 4))}
    index = RegionIndex(Power(PowerSettings(budgets_w=budgets, overcommit=rng.choice([1, 1.5]))))
    for n in range(16):
        where_ = {"msb": f"msb{1 + n % 2}", "rack": f"rack{1 + n % 3}"}
        power_w = rng.choice([0, 150, 400])
        add(index, f"m{n}", pool=rng.choice([*pools, FREE]), power_w=power_w, **where_)
    for _ in range(40):
        job = f"j{rng.randrange(5)}"
        request = a_request(rng.randrange(12), job, pool=pools[int(job[1:]) % 2])
        made = plan(index, request, Allowance())
        if rng.random() < 0.2 and not index.reserve(made.change):
            index.rollback(made.change)
        else:
            settle(index, made)
        check(index)
        for budget in index.power_budgets():
            assert budget.used_w <= budget.limit_w
            inside = [
                m.capacity.power_w
                for m in index.machines.values()
                if m.jobs and f"{m.place.rack}/".startswith(f"{budget.place}/")
            ]
            assert sum(inside) == budget.used_w
