"""Asks that find no room judge few machines in a region of any size, and give correct reasons."""

import pytest
from regions import (
    FREE,
    GIB,
    RegionIndex,
    a_capacity,
    a_place,
    a_request,
    add,
    allocate,
    check,
    plan,
    settle,
)

from control_plane.allocator.core import bin_source, draft, explanation, machine_search
from control_plane.allocator.core.bin_order import LazyOrder
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.feasibility import fits_each, judge
from control_plane.allocator.core.power import Power
from control_plane.allocator.core.preferences import Ranking
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.api.policy import Fit, Preference
from control_plane.api.requirements import Exists, In, Not
from control_plane.api.settings import PowerSettings

LEVELS = ["dc1", "dc1/msb1", "dc1/msb1/row1", "dc1/msb1/row1/rack"]
POOLS = pytest.mark.parametrize("pool", ["e1", FREE])
EVEN_RACKS = (Preference(property="rack"),)
EACH = 40
"""Machines in a rack."""


def a_region_with(budgets: dict[str, int], racks: int, pool: str, **fields) -> RegionIndex:
    index = RegionIndex(Power(PowerSettings(budgets_w=budgets, overcommit=1.0)))
    capacity = a_capacity(power_w=100, **fields)
    index.put_many(
        (f"r{rack}-{n}", capacity, a_place(rack=f"rack{rack}"), pool, "")
        for rack in range(racks)
        for n in range(EACH)
    )
    return index


@pytest.fixture
def judged(monkeypatch) -> list[str]:
    """Record which machines a plan asks power about, and do without reasons."""
    seen: list[str] = []
    is_short = draft.Draft.is_short

    def watched(work, machine):
        seen.append(machine.name)
        return is_short(work, machine)

    monkeypatch.setattr(draft.Draft, "is_short", watched)
    monkeypatch.setattr(explanation, "_EXPLAINED", 10)
    return seen


@pytest.mark.behaviour("BUG-AL27")
@POOLS
@pytest.mark.parametrize("fit", [Fit.EVEN, Fit.TIGHT])
@pytest.mark.parametrize("level", LEVELS)
def test_where_power_is_used_up_no_single_machine_is_judged(level, pool, fit, judged):
    """An ask took 1.3 s at 200,000 machines."""
    racks = 25
    places = [f"{level}{n}" for n in range(racks)] if level.endswith("rack") else [level]
    index = a_region_with(dict.fromkeys(places, 99), racks, pool)
    for size in (4, 3, 2):  # each is smaller, so no earlier search in vain applies
        made = plan(index, a_request(3, demand=Demand(GIB, cpus=size), fit=fit), Allowance())
        assert len(made.unplaced) == 3
        assert any("power: dc1" in reason for reason in made.reasons)
    assert len(judged) < 30


@pytest.fixture
def tried(monkeypatch) -> list[str]:
    """Record the machines that a search judges."""
    seen: list[str] = []

    def watched(demand, machine, room):
        seen.append(machine.name)
        return judge(demand, machine, room)

    for module in (bin_source, machine_search):
        monkeypatch.setattr(module, "judge", watched)
    return seen


@pytest.mark.parametrize(
    "demand",
    [
        Demand(5 * GIB, cpus=1),
        Demand(GIB, cpus=5),
        Demand(GIB, gpus=1),
        Demand(GIB, network_mbps=1),
        Demand(GIB, cpus=1, disk_bytes=2 * GIB),
    ],
)
def test_where_each_machine_is_too_small_no_more_than_a_few_are_judged(demand, tried):
    """The first ask judged all machines: 208 ms at 100,000 machines."""
    index = a_region_with({}, 25, "e1", disk_bytes=GIB)
    assert len(plan(index, a_request(3, demand=demand), Allowance()).unplaced) == 3
    assert len(tried) < 20
    whole = Demand(4 * GIB, cpus=4, disk_bytes=GIB)
    assert not plan(index, a_request(3, demand=whole), Allowance()).unplaced


def test_machines_that_single_ones_exclude_are_judged_once_for_a_demand(tried):
    """Machines of a bucket may be in different racks, so each machine is judged, but only once."""
    index = a_region_with({}, 25, "e1")
    nowhere = Demand(GIB, cpus=1, requires=(In("rack", frozenset({"rack99"})),))
    for job in ("a", "b", "c"):
        assert len(plan(index, a_request(3, job, demand=nowhere), Allowance()).unplaced) == 3
    assert 1_000 <= len(tried) < 1_100


@pytest.mark.parametrize("fit", [Fit.EVEN, Fit.TIGHT])
def test_machines_with_too_little_left_are_searched_once_for_any_later_request(fit, tried):
    """1,000 machines have 1,000 MiB left each. Asks that need more do not search them again."""
    mib, index = GIB >> 10, a_region_with({}, 25, "e1")
    most = Demand(4 * GIB - 1_000 * mib, cpus=2)
    held = [Claim(n, machine, most) for n, machine in enumerate(index.machines.values())]
    index.restore("others", "e1", held)
    for size in (1_010, 1_009, 1_008, 1_005):
        request = a_request(3, demand=Demand(size * mib, cpus=1), fit=fit)
        made = plan(index, request, Allowance())
        assert len(made.unplaced) == 3
        assert any("at most 1000 MiB free" in reason for reason in made.reasons)
    assert len(tried) < 1_100
    staying = Request("others", "e1", (Group(most, tuple(range(1, 1_000))),))
    settle(index, plan(index, staying, Allowance()))
    assert plan(index, request, Allowance()).change.claims[0].machine is held[0].machine


@pytest.mark.behaviour("BUG-AL27")
@POOLS
@pytest.mark.parametrize("level", LEVELS)
def test_released_power_is_found_again(level, pool):
    """The result of a search in vain is dropped when power is released."""
    places = [f"{level}{n}" for n in range(3)] if level.endswith("rack") else [level]
    index = a_region_with(dict.fromkeys(places, 100), 3, pool)
    for rack in range(3):
        add(index, f"other{rack}", pool="e2", rack=f"rack{rack}", power_w=100)
    whole, count = Demand(GIB, cpus=4), len(places)
    theirs = a_request(count, "theirs", "e2", whole, preferences=EVEN_RACKS)
    assert not allocate(index, theirs).unplaced
    for _ in range(2):
        assert allocate(index, a_request(1, demand=whole), Allowance()).unplaced == (0,)
    allocate(index, a_request([], "theirs", "e2"))
    assert not allocate(index, a_request(count, demand=whole), Allowance()).unplaced
    check(index)


@pytest.mark.behaviour("BUG-AL27")
def test_power_that_a_plan_uses_itself_is_not_remembered_as_used_up():
    index = a_region_with({"dc1": 100}, 2, "e1")
    add(index, "m2", "msb2", power_w=100)
    here, there = (
        Demand(GIB, cpus=1, requires=(In("msb", frozenset({msb})),)) for msb in ("msb1", "msb2")
    )
    made = plan(index, Request("web", "e1", (Group(here, (0,)), Group(there, (1,)))), Allowance())
    assert made.unplaced == (1,)
    assert not plan(index, a_request(1, "other", demand=there), Allowance()).unplaced


def test_a_machine_in_use_gets_more_tasks_where_power_is_used_up():
    index = a_region_with({"dc1": 100}, 2, "e1")
    made = allocate(index, a_request(4), Allowance())
    assert not made.unplaced
    assert not allocate(index, a_request(0, "none"), Allowance()).unplaced
    assert len({claim.machine for claim in index.claims["web"]}) == 1


@pytest.mark.behaviour("BUG-AL28")
def test_free_machines_that_another_entitlement_needs_are_refused_as_one():
    """An ask took 1.3 s at 100,000 free machines."""
    index = a_region_with({}, 25, FREE)
    demand, checked = Demand(GIB, cpus=1), []

    def refuses(machine):
        checked.append(machine.name)
        return "reserved for entitlement e2" if not judge(demand, machine, machine) else ""

    def refuses_all(bucket):
        return "reserved for entitlement e2" if fits_each(demand, bucket) else ""

    made = plan(index, a_request(3), Allowance(refuses=refuses, refuses_all=refuses_all))
    assert len(made.unplaced) == 3
    assert "1000 free machines: reserved for entitlement e2" in made.reasons
    assert checked == []


@pytest.mark.behaviour("BUG-AL28")
@pytest.mark.parametrize(
    ("demand", "fits"),
    [
        (Demand(GIB, cpus=4), True),
        (Demand(5 * GIB, cpus=1), False),
        (Demand(GIB, cpus=1, requires=(In("machine_type", frozenset({"small"})),)), True),
        (Demand(GIB, cpus=1, requires=(Not(In("msb", frozenset({"msb9"}))),)), True),
        (Demand(GIB, cpus=1, requires=(In("msb", frozenset({"msb9"})),)), False),
        (Demand(GIB, cpus=1, requires=(In("rack", frozenset({"rack0"})),)), False),
        (Demand(GIB, cpus=1, requires=(Exists("label.gold"),)), False),
    ],
)
def test_all_machines_of_a_kind_are_kept_only_if_each_of_them_would_do(demand, fits):
    index = a_region_with({}, 1, FREE)
    (bucket,) = index.pool(FREE).buckets.values()
    assert fits_each(demand, bucket) is fits


@pytest.mark.behaviour("BUG-AL34")
@POOLS
@pytest.mark.parametrize(
    ("demand", "left", "message"),
    [
        (Demand(4 * GIB, cpus=1), Demand(GIB, cpus=3.5), "at most 3072 MiB free"),
        (Demand(GIB, cpus=4), Demand(3.5 * GIB, cpus=1), "at most 3 cores free"),
        (Demand(1, gpus=2), Demand(4 * GIB, gpus=7), "at most 1 free"),
        (Demand(1, network_mbps=90), Demand(4 * GIB, network_mbps=20), "at most 80 free"),
        (Demand(1, disk_bytes=9 * GIB), Demand(4 * GIB, disk_bytes=GIB), "at most 8192 MiB free"),
    ],
)
def test_the_largest_free_amount_is_of_all_machines(demand, left, message, pool, monkeypatch):
    """The amount covered the first thousand machines only; the roomiest machine came later."""
    monkeypatch.setattr(explanation, "_EXPLAINED", 10)
    fields = {"gpus": 8 if demand.gpus else 0, "network_mbps": 100, "disk_bytes": 9 * GIB}
    index = a_region_with({}, 2, pool, **fields)
    full = Demand(4 * GIB, cpus=4, gpus=fields["gpus"], network_mbps=100, disk_bytes=9 * GIB)
    names = list(index.machines)
    claims = [Claim(n, index.machines[name], full) for n, name in enumerate(names)]
    claims[70] = Claim(70, index.machines[names[70]], left)
    index.restore("there", pool, claims)
    made = plan(index, a_request(1, demand=demand), Allowance())
    assert made.unplaced == (0,)
    assert any(message in reason for reason in made.reasons), made.reasons
    assert any("these are 10 of" in reason for reason in made.reasons)


@pytest.mark.behaviour("BUG-AL27")
@pytest.mark.parametrize("level", ["rack", "row"])
def test_a_preference_over_racks_examines_at_most_one_per_task(level, monkeypatch):
    """An ask cost 120 to 320 times as much as the default spread: it grouped all machines."""
    checked_bins: list[object] = []
    count = LazyOrder._read_next

    def follow(order, heap, tie):
        checked_bins.append(tie)
        count(order, heap, tie)

    parted = []
    common_bins = Ranking.common_bins
    monkeypatch.setattr(Ranking, "common_bins", lambda r, m: parted.append(m) or common_bins(r, m))
    monkeypatch.setattr(LazyOrder, "_read_next", follow)
    for racks in (50, 200):
        index = RegionIndex()
        index.put_many(
            (f"m{rack}-{n}", a_capacity(), a_place(rack=f"k{rack}", row=f"w{rack}"), "e1", "")
            for rack in range(racks)
            for n in range(5)
        )
        spread_evenly = (Preference(property=level),)
        assert not allocate(index, a_request(3, "first", preferences=spread_evenly)).unplaced
        parted.clear()
        checked_bins.clear()
        assert not allocate(index, a_request(9, "next", preferences=spread_evenly)).unplaced
        assert parted == []
        assert len(checked_bins) <= 20
        index.put("new", a_capacity(), a_place(rack="new", row="new"), "e1", "")
        made = allocate(index, a_request(racks + 1, "all", preferences=spread_evenly))
        assert "new" in {claim.machine.name for claim in made.change.claims}
        check(index)
