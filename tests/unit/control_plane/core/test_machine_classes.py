"""Machines share a bucket only if all properties of the bucket hold for each of them."""

import pytest
from regions import FREE, GIB, RegionIndex, a_capacity, a_place, a_request, add, allocate, check

from agent.api import Location
from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.planner import planning
from control_plane.allocator.core.request import Allowance
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.requirements import Compare
from control_plane.broker.core import capacity

pytestmark = pytest.mark.behaviour("BUG-AL21")

OFFER = {"rru": 4.0, "cpus": 2.0, "network_mbps": 100, "power_w": 100, "disk_bytes": 8 * GIB}
OTHERS = [
    ("cpus", 8.0, Demand(GIB, cpus=6)),
    ("cpus", 0.0, None),
    ("gpus", 4, Demand(GIB, cpus=1, gpus=4)),
    ("network_mbps", 9000, Demand(GIB, cpus=1, network_mbps=5000)),
    ("memory_bytes", 64 * GIB, Demand(40 * GIB, cpus=1)),
    ("disk_bytes", 64 * GIB, Demand(GIB, cpus=1, disk_bytes=40 * GIB)),
    ("rru", 9.0, Demand(GIB, rru=8)),
    ("power_w", 900, Demand(GIB, cpus=1, requires=(Compare("power_w", ">", 500),))),
    ("gpu_type", "t4", None),
    ("sku", "other", None),
    ("generation", "other", None),
]
WITH_A_TASK = [(field, value, demand) for field, value, demand in OTHERS if demand is not None]


def buckets(index: RegionIndex, pool: str = "e1") -> list[list[str]]:
    found = index.pool(pool).buckets.values()
    return sorted(sorted(m.name for m in bucket.machines()) for bucket in found)


@pytest.mark.behaviour("BUG-AL21")
@pytest.mark.parametrize(("field", "value", "_demand"), OTHERS)
def test_machines_that_differ_in_a_compared_property_share_no_bucket(field, value, _demand):
    index = RegionIndex()
    add(index, "first", **OFFER)
    add(index, "alike", **OFFER)
    add(index, "other", **{**OFFER, field: value})
    assert buckets(index) == [["alike", "first"], ["other"]]


def test_labels_capabilities_and_places_within_an_msb_do_not_part_machines():
    index = RegionIndex()
    add(index, "a", rack="r1")
    add(index, "b", rack="r2", labels=(("tier", "gold"),))
    add(index, "c", row="w2", capabilities=frozenset({"nested"}))
    assert buckets(index) == [["a", "b", "c"]]
    (bucket,) = index.pool("e1").buckets.values()
    assert (bucket.capacity.labels, bucket.capacity.capabilities) == ((), frozenset())
    assert (bucket.place.row, bucket.place.rack) == ("", "")


def test_a_little_more_memory_parts_no_machines():
    """Agents report the memory that the kernel leaves; each machine would have its own bucket."""
    index = RegionIndex()
    for number in range(200):
        add(index, f"m{number}", memory_bytes=64 * GIB + number * 4096)
    assert len(buckets(index)) == 1


@pytest.mark.behaviour("BUG-AL21")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize(("field", "value", "demand"), WITH_A_TASK)
def test_a_task_finds_the_one_machine_that_has_room(field, value, demand, pool):
    """The search treated all machines of the bucket like its first one."""
    index = RegionIndex()
    add(index, ["f1", "f2"], pool=pool, **OFFER)
    add(index, "other", pool=pool, **{**OFFER, field: value})
    filler = allocate(index, a_request(3, "filler", demand=Demand(1, cpus=0.1)), Allowance())
    assert (
        not filler.unplaced
    )  # each machine has a task, so none is on the space class of empty machines
    made = allocate(index, a_request(1, demand=demand), Allowance())
    assert not made.unplaced, made.reasons
    check(index)


@pytest.mark.behaviour("BUG-AL21")
def test_a_small_first_machine_does_not_hide_the_cores_of_a_larger_one():
    """The planner assumed that no machine has four cores."""
    index = RegionIndex()
    add(index, "small1", cpus=2.0)
    add(index, "large", cpus=7.0)
    add(index, "small2 empty", cpus=2.0)
    assert not allocate(index, a_request(3, "filler", demand=Demand(1, cpus=2.0))).unplaced
    made = allocate(index, a_request(1, demand=Demand(GIB, cpus=4.0)))
    assert not made.unplaced, made.reasons


@pytest.mark.behaviour("BUG-AL21")
def test_a_corrected_inventory_counts_at_once():
    """Four added GPUs were found only after a restart."""
    index = RegionIndex()
    add(index, "a b")
    allocate(index, a_request(2, "other", demand=Demand(GIB, cpus=1)))
    wanted = Demand(GIB, cpus=1, gpus=2)
    assert allocate(index, a_request(2, demand=wanted)).unplaced == (0, 1)
    add(index, "a b", gpus=4)
    assert not allocate(index, a_request(2, demand=wanted)).unplaced
    check(index)


@pytest.mark.behaviour("BUG-AL21", "BUG-AL31")
def test_a_bucket_is_dropped_with_its_last_machine():
    index = RegionIndex()
    add(index, "a b", pool="e1")
    add(index, "a", pool=FREE)
    assert (buckets(index), buckets(index, FREE)) == ([["b"]], [["a"]])
    add(index, "b", pool="e1", gpus=2)
    assert len(index.pool("e1").buckets) == 1
    index.put("a", a_capacity(), a_place("msb2"), FREE, "")
    index.remove("b")
    assert (buckets(index), buckets(index, FREE)) == ([], [["a"]])
    index.remove("a")
    assert buckets(index, FREE) == []


@pytest.mark.behaviour("BUG-AL31")
def test_a_pool_is_dropped_with_its_last_machine_and_its_gains_never_fall():
    """Pools of removed entitlements stayed permanently."""
    index = RegionIndex()
    seen = []
    for number in range(30):
        pool = f"e{number}"
        seen.append(index.gains("e0"))
        add(index, "a b", pool=pool)
        allocate(index, a_request(2, pool=pool))
        seen.append(index.gains("e0"))
        allocate(index, a_request([], pool=pool))
        add(index, "a b", pool=FREE)
        index.note_gain(pool)
    assert list(index.pools) == [FREE]
    assert seen == sorted(seen)
    assert index.gains("e0") >= seen[-1]
    index.gains("asked")
    index.pool("asked")
    assert "asked" not in index.pools


@pytest.mark.behaviour("BUG-AL31")
def test_a_plan_continues_if_its_pool_is_dropped():
    index = RegionIndex()
    add(index, "a", pool="e1")
    add(index, "f", pool=FREE)
    steps = planning(index, a_request(1501, demand=Demand(1)), Allowance())
    next(steps)
    add(index, "a", pool=FREE)
    made = _finish(steps)
    assert index.reserve(made.change) == ("a",)
    made = allocate(index, a_request(1501, demand=Demand(1)), Allowance())
    assert not made.unplaced
    check(index)


def _finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


@pytest.mark.behaviour("BUG-AL31")
def test_capacities_and_places_are_dropped_with_their_machines(monkeypatch):
    """All capacities and places ever seen stayed in memory."""
    monkeypatch.setattr(capacity, "_SWEEP", 10)
    kinds, kept = capacity.Kinds(), []
    for number in range(200):
        record = MachineRecord(
            machine=f"m{number}",
            machine_type="small",
            location=Location(rack=f"r{number}"),
            hardware=Hardware(cpus=number + 1, memory_bytes=GIB),
        )
        kept = [kinds.capacity(record), kinds.place(record)]
        assert kinds.capacity(record) is kept[0]
        assert kinds.place(record) is kept[1]
    assert len(kinds._capacities) <= 2
    assert len(kinds._of_hardware) <= 11
    assert len(kinds._places) <= 11
