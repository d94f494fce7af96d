"""Scarce resources are kept for tasks that need them: GPUs, memory, network and disk."""

from collections import Counter

import pytest
from regions import FREE, GIB, Machine, RegionIndex, a_request, add, allocate, check

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.request import Allowance

RARE = {
    "gpus": {"gpus": 8},
    "memory": {"memory_bytes": 64 * GIB},
    "network": {"network_mbps": 100_000},
    "disk": {"disk_bytes": 9_000 * GIB},
}
WHOLE = {
    "gpus": Demand(GIB, cpus=4, gpus=8),
    "memory": Demand(64 * GIB, cpus=4),
    "network": Demand(GIB, cpus=4, network_mbps=100_000),
    "disk": Demand(GIB, cpus=4, disk_bytes=9_000 * GIB),
}
SMALL = Demand(GIB, cpus=1, network_mbps=10, disk_bytes=GIB)
POOLS = pytest.mark.parametrize("pool", ["e1", FREE])


def a_mix(rare: str, pool: str, first: str = "rare") -> RegionIndex:
    """Return 24 equal machines and 4 that have more of one resource."""
    index, common = RegionIndex(), {"network_mbps": 1_000, "disk_bytes": 100 * GIB}
    kinds = {"common": (24, common), "rare": (4, {**common, **RARE[rare]})}
    for kind in (first, *({"common", "rare"} - {first})):
        number, fields = kinds[kind]
        names = [f"{kind}{n}" for n in range(number)]
        add(index, names, machine_type=kind, pool=pool, **fields)
    return index


def kinds_of(index: RegionIndex, job: str = "web") -> Counter[str]:
    return Counter(claim.machine.capacity.machine_type for claim in index.claims[job])


@pytest.mark.behaviour("BUG-AL24", "BUG-AL25")
@POOLS
@pytest.mark.parametrize("rare", RARE)
@pytest.mark.parametrize("first", ["rare", "common"])
def test_rare_machines_are_left_to_tasks_that_need_them(rare, pool, first):
    """Disk was kept for no task. Network and memory were kept only in the free pool."""
    index = a_mix(rare, pool, first)
    made = allocate(index, a_request(96, demand=SMALL), Allowance())
    assert not made.unplaced
    assert kinds_of(index) == {"common": 96}
    assert not allocate(index, a_request(4, "big", demand=WHOLE[rare]), Allowance()).unplaced
    check(index)


@POOLS
@pytest.mark.parametrize("rare", RARE)
def test_rare_machines_are_used_by_other_tasks_as_a_last_resort(rare, pool):
    index = a_mix(rare, pool)
    made = allocate(index, a_request(100, demand=SMALL), Allowance())
    assert not made.unplaced
    assert kinds_of(index) == {"common": 96, "rare": 4}
    assert len({c.machine for c in index.claims["web"] if c.machine.capacity.gpus}) <= 4


@pytest.mark.behaviour("BUG-AL24")
@pytest.mark.parametrize("rare", RARE)
def test_a_free_machine_is_used_before_a_rare_held_one(rare):
    """Tasks without GPUs filled the held machines with GPUs before a free one."""
    index, common = RegionIndex(), {"network_mbps": 1_000, "disk_bytes": 100 * GIB}
    add(index, [f"c{n}" for n in range(24)], machine_type="common", pool=FREE, **common)
    add(index, "r1 r2", machine_type="rare", **RARE[rare])
    allocate(index, a_request(1, "owner", demand=Demand(GIB // 4, cpus=0.5, gpus=0)), Allowance())
    made = allocate(index, a_request(4, demand=Demand(GIB, cpus=1)), Allowance())
    assert not made.unplaced
    assert kinds_of(index) == {"common": 4}
    made = allocate(index, a_request(2, "late", demand=Demand(GIB, cpus=4)), Allowance(machines=0))
    assert kinds_of(index, "late") == {"rare": 2}


def test_a_property_reported_by_few_machines_is_not_rare():
    """The other machines of a new region have not joined, so their disks are unknown."""
    index = RegionIndex()
    add(index, [f"listed{n}" for n in range(9)], blocked="has not joined", memory_bytes=0)
    add(index, "joined1 joined2", disk_bytes=9 * GIB, network_mbps=1_000)
    allocate(index, a_request(2))
    assert {claim.machine.name for claim in index.claims["web"]} == {"joined1", "joined2"}
    allocate(index, a_request(1, "other"))
    allocate(index, a_request(1, "third"))
    assert {len(index.machines[name].jobs) for name in ("joined1", "joined2")} == {2}


def left_whole(index: RegionIndex, gpus: int) -> list[Machine]:
    return [m for m in index.machines.values() if m.capacity.gpus == m.free_gpus == gpus]


@pytest.mark.behaviour("BUG-AL24")
@POOLS
def test_small_gpu_tasks_break_no_large_machine_while_a_small_one_is_free(pool):
    """From a free pool 90.9 % of all GPUs were given out; best fit gives out 97.0 %."""
    index = RegionIndex()
    add(index, "g8a g8b g8c", machine_type="gpu8", gpus=8, pool=pool, cpus=96.0, rru=96.0)
    add(index, "g2a g2b g2c", machine_type="gpu2", gpus=2, pool=pool, cpus=48.0, rru=48.0)
    whole = Demand(GIB, cpus=8, gpus=8)
    assert not allocate(index, a_request(1, "whole", demand=whole), Allowance()).unplaced
    half = Demand(GIB // 8, cpus=1, gpus=4)
    assert not allocate(index, a_request(1, "half", demand=half), Allowance()).unplaced
    one = Demand(GIB // 8, cpus=1, gpus=1)
    for number in range(10):
        assert not allocate(index, a_request(1, f"j{number}", demand=one), Allowance()).unplaced
    assert len(left_whole(index, 8)) == 1
    assert not allocate(index, a_request(1, "second", demand=whole), Allowance()).unplaced
    assert sum(machine.free_gpus for machine in index.machines.values()) == 0


def test_a_gpu_task_uses_what_the_pool_holds_if_it_may_take_no_machine():
    index = RegionIndex()
    add(index, "g8", machine_type="gpu8", gpus=8)
    add(index, "g2", machine_type="gpu2", gpus=2, pool=FREE)
    one = Demand(GIB // 8, cpus=0.25, gpus=1)
    allowance = Allowance(per_type={"gpu8": 1})
    assert not allocate(index, a_request(9, demand=one), allowance).change.takes
    assert kinds_of(index) == {"gpu8": 8}
