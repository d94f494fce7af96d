"""The paper's figures about entitlements and spreading (§2.2, Figures 6 and 7), replayed."""

from collections import Counter
from fractions import Fraction

import pytest
from regions import (
    FREE,
    GIB,
    TASK,
    Allowance,
    Group,
    RegionIndex,
    Request,
    a_region,
    a_request,
    add,
    allocate,
    check,
    per,
    plan,
    settle,
    where,
)

from control_plane.allocator.core.demand import Demand
from control_plane.api.policy import Property

HALF = Demand(2 * GIB, cpus=2)


def give_back(index: RegionIndex, machines) -> None:
    """Return machines that an allocation left empty, as brokers do."""
    for machine in machines:
        index.put(machine.name, machine.capacity, machine.place, FREE, machine.blocked)


@pytest.mark.behaviour("CP5", "MO12", "AL10")
def test_figure_6():
    """Jobs A and B of one entitlement stack on M3. C grows; M6 goes to the other entitlement."""
    index = RegionIndex()
    add(index, "m1", "msb1", "dc1", "entitlement1")
    add(index, "m2", "msb1", "dc1", FREE, blocked="is in maintenance")
    add(index, "m3", "msb2", "dc1", "entitlement1")
    add(index, "m4", "msb1", "dc2", "entitlement1")
    add(index, "m5", "msb1", "dc2", "entitlement2")
    add(index, "m6", "msb2", "dc2", FREE)

    for job, msbs in (("a", {"dc1/msb1", "dc1/msb2"}), ("b", {"dc1/msb2", "dc2/msb1"})):
        demand = Demand(2 * GIB, cpus=2, requires=((Property.MSB, frozenset(msbs)),))
        allocate(index, a_request(2, job, "entitlement1", demand))
    allocate(index, a_request(2, "c", "entitlement2", HALF), Allowance(machines=0))
    assert set(where(index, "a").values()) == {"m1", "m3"}
    assert set(where(index, "b").values()) == {"m3", "m4"}  # stacked on M3
    assert set(where(index, "c").values()) == {"m5"}

    grown = allocate(index, a_request(4, "c", "entitlement2", HALF), Allowance(machines=1))
    assert [m.name for m in grown.change.takes] == ["m6"]
    assert Counter(where(index, "c").values()) == {"m5": 2, "m6": 2}
    check(index)


@pytest.mark.behaviour("CP4", "CP9", "AL10")
def test_figure_7():
    index = RegionIndex()
    add(index, "m7", "msb1", pool=FREE)
    settled = allocate(index, a_request(1, "d", demand=HALF), Allowance(machines=2))
    assert [m.name for m in settled.change.takes] == ["m7"]
    assert where(index, "d") == {0: "m7"}
    assert index.pool("e1").size == 1

    add(index, "m8", "msb1", pool=FREE)
    started = allocate(index, a_request(2, "e", demand=HALF), Allowance(machines=1))
    assert where(index, "e") == {0: "m7", 1: "m8"}  # one stacked on M7
    assert [m.name for m in started.change.takes] == ["m8"]
    assert index.pool("e1").size == 2

    emptied = settle(index, plan(index, a_request([], "e"), Allowance(machines=0)))
    assert [m.name for m in emptied] == ["m8"]
    give_back(index, emptied)
    assert [m.name for m in index.pool(FREE).machines()] == ["m8"]
    assert [m.name for m in index.pool("e1").machines()] == ["m7"]
    assert where(index, "d") == {0: "m7"}
    check(index)


def lose(index: RegionIndex, msb: str, job: str = "web") -> Request:
    """Fail an MSB; return the request that moves the job's tasks out of it."""
    lost: dict[str, list[int]] = {}
    staying = []
    for task, name in where(index, job).items():
        if index.machines[name].place.msb == msb:
            lost.setdefault(name, []).append(task)
        else:
            staying.append(task)
    for name, machine in list(index.machines.items()):
        if machine.place.msb == msb:
            index.block(name, "is down")
    groups = [Group(TASK, tuple(staying))]
    groups += [Group(TASK, tuple(tasks), leave=frozenset({name})) for name, tasks in lost.items()]
    return Request(job, "e1", tuple(groups))


@pytest.mark.behaviour("AL9", "AL8")
@pytest.mark.parametrize(
    ("datacenters", "msbs", "buffer"), [(1, 12, Fraction(1, 12)), (5, 12, Fraction(1, 60))]
)
def test_the_buffer_against_the_loss_of_an_msb(datacenters, msbs, buffer):
    """12 MSBs in one data center need 1/12 = 8.3 %; 60 in five need 1/60 = 1.7 %."""
    tasks = 660
    index = a_region(datacenters, msbs, machines=2 * -(-tasks // (4 * datacenters * msbs)))
    assert not allocate(index, a_request(tasks)).unplaced
    counts = per(index, "msb")
    assert counts[-1] == counts[0] == tasks * buffer
    assert round(float(buffer) * 100, 1) == {12: 8.3, 60: 1.7}[datacenters * msbs]

    msb = "dc1/msb7"
    held = [name for name in where(index).values() if index.machines[name].place.msb == msb]
    assert Fraction(len(held), tasks) == buffer
    again = lose(index, msb)
    made = allocate(index, again)
    assert made.unplaced == ()
    assert len(made.change.claims) == len(made.change.freed) == tasks * buffer
    check(index)
    left = Counter(index.machines[name].place.msb for name in where(index).values())
    assert sum(left.values()) == tasks
    assert msb not in left
    assert len(left) == datacenters * msbs - 1
    assert max(left.values()) - min(left.values()) <= 1
    assert plan(index, again, Allowance()).change.is_empty


@pytest.mark.behaviour("AL9", "AL10", "CP3")
def test_machines_in_place_of_a_lost_msb_come_from_the_free_pool():
    index = a_region(datacenters=2, msbs=3, machines=1)
    for msb in range(1, 4):
        add(index, f"f{msb}", f"msb{msb}", "dc2", FREE)
    allocate(index, a_request(24))
    made = allocate(index, lose(index, "dc1/msb1"), Allowance(machines=1))
    assert made.unplaced == ()
    assert len(made.change.takes) == 1
    check(index)


@pytest.mark.behaviour("WH1")
def test_capacity_stranded_in_one_data_center_serves_a_job_of_another():
    index = a_region(datacenters=2, msbs=2, machines=1)
    pinned = Demand(GIB, cpus=1, requires=((Property.DATACENTER, frozenset({"dc1"})),))
    allocate(index, a_request(6, "elder", demand=pinned))
    allocate(index, a_request(2, demand=pinned))
    assert per(index, "datacenter", "web") == [0, 2]
    groups = (Group(pinned, (0, 1)), Group(TASK, tuple(range(2, 10))))
    made = allocate(index, Request("web", "e1", groups))
    assert made.unplaced == ()
    assert per(index, "datacenter", "web") == [2, 8]
    assert not list(index.fitting(TASK))
