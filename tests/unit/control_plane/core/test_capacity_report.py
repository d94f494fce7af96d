"""The capacity report, on regions small enough to add up by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Location
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.capacity_report import CapacityReport
from control_plane.api.machines import (
    EventKind,
    Hardware,
    Loan,
    MachineRecord,
    MachineState,
    UnavailabilityEvent,
)
from control_plane.broker.core.capacity import capacity_of
from control_plane.portal.core.report import NOTHING, PortalReport, Used

GIB = 1 << 30
BIG = Hardware(rru=4.0, cpus=8, memory_bytes=64 * GIB, power_w=400)
SMALL = Hardware(rru=1.0, cpus=2, memory_bytes=8 * GIB, power_w=100)
FULL = Used(
    4.0,
    capacity_of(
        MachineRecord(machine="x", location=Location(), machine_type="big", hardware=BIG)
    ).memory_bytes,
)


def machine(name: str, entitlement: str = "", hardware: Hardware = BIG, **fields) -> MachineRecord:
    values = {"location": Location(datacenter="dc1", msb="msb1")} | fields
    return MachineRecord(
        machine=name,
        machine_type="big" if hardware is BIG else "small",
        hardware=hardware,
        entitlement=entitlement,
        **values,
    )


def entitlement(name: str, unit: str = "", **fields) -> EntitlementRecord:
    return EntitlementRecord(name=name, spec=EntitlementSpec(business_unit=unit, **fields))


def capacity_report(machines, entitlements, used, now: float) -> CapacityReport:
    report = PortalReport(now)
    for record in machines:
        report.add(record, used.get(record.machine, NOTHING))
    return report.finish(entitlements)


def by_name(lines) -> dict:
    return {line.name: line for line in lines}


@pytest.mark.behaviour("MO13")
def test_usage_is_rolled_up_through_the_business_units():
    report = capacity_report(
        [machine("m1", "rank"), machine("m2", "rank"), machine("m3", "feed"), machine("m4")],
        [
            entitlement("rank", "ads/ranking", machines=5),
            entitlement("show", "ads/ranking", rru=20.0),
            entitlement("bill", "ads/billing", per_type={"big": 2, "small": 1}),
            entitlement("feed", "feed", machines=1),
            entitlement("none", machines=1),
        ],
        {"m1": Used(3.0, GIB), "m3": Used(1.0, 2 * GIB)},
        now=0,
    )
    units = by_name(report.units)
    assert [line.name for line in report.units] == [
        "",
        "ads",
        "ads/billing",
        "ads/ranking",
        "feed",
    ]
    assert (units[""].granted_machines, units[""].granted_rru) == (10, 20.0)
    assert (units["ads"].granted_machines, units["ads"].granted_rru) == (8, 20.0)
    assert (units["ads"].held.machines, units["ads"].held.rru) == (2, 8.0)
    assert (units["ads"].used.machines, units["ads"].used.rru) == (1, 3.0)
    assert units[""].used.memory_bytes == 3 * GIB
    assert by_name(report.entitlements)["bill"].granted_machines == 3


def test_the_free_pool_is_shown_by_type_and_data_center():
    dc2 = Location(datacenter="dc2", msb="msb1")
    report = capacity_report(
        [machine("m1", "e"), machine("m2"), machine("m3", "", SMALL, location=dc2)],
        [entitlement("e", machines=2)],
        {},
        now=0,
    )
    types = by_name(report.types)
    assert (types["big"].free.machines, types["big"].held.machines) == (1, 1)
    assert (types["small"].free.rru, types["small"].all.machines) == (1.0, 1)
    assert by_name(report.datacenters)["dc2"].free.machines == 1
    assert set(by_name(report.msbs)) == {"dc1/msb1", "dc2/msb1"}


@pytest.mark.behaviour("AL22")
def test_held_power_may_exceed_the_provisioned_power_and_is_shown_per_msb():
    other = Location(datacenter="dc1", msb="msb2")
    report = capacity_report(
        [machine("m1", "e"), machine("m2"), machine("m3", "e", SMALL, location=other)],
        [entitlement("e", machines=2)],
        {},
        now=0,
    )
    msbs = by_name(report.msbs)
    assert (msbs["dc1/msb1"].held.power_w, msbs["dc1/msb1"].all.power_w) == (400, 800)
    assert (msbs["dc1/msb2"].held.power_w, msbs["dc1/msb2"].all.power_w) == (100, 100)


@pytest.mark.behaviour("CP8")
def test_small_entitlements_and_badly_used_machines_are_counted():
    memory = capacity_of(machine("x")).memory_bytes
    report = capacity_report(
        [machine(f"m{i}", "large") for i in range(5)] + [machine("s1", "small")],
        [
            entitlement("large", machines=5000),
            entitlement("small", machines=10),
            entitlement("tiny", rru=8.0),
            entitlement("middle", machines=11),
        ],
        {
            "m1": Used(4.0, 0),
            "m2": Used(1.0, memory),
            "m3": Used(1.9, 0),
            "m4": FULL,
            "s1": Used(3.0, memory // 2),
        },
        now=0,
    )
    found = report.fragmentation
    assert (found.entitlements, found.small, found.small_share, found.small_held) == (4, 2, 0.5, 1)
    assert (found.held, found.half_empty, found.idle) == (6, 2, 1)
    assert found.stranded_rru == 3.0
    assert found.stranded_memory_bytes == memory
    assert [(t.machine_type, t.rru, t.memory_bytes) for t in found.largest] == [
        ("big", 4.0, memory)
    ]


@pytest.mark.behaviour("CP8")
def test_the_largest_task_fits_one_machine_and_not_two_halves():
    memory = capacity_of(machine("x")).memory_bytes
    report = capacity_report(
        [machine("m1", "e"), machine("m2", "e"), machine("m3", "e")],
        [entitlement("e", machines=3)],
        {"m1": Used(0.4, memory), "m2": Used(4.0, 1), "m3": Used(2.0, memory // 2)},
        now=0,
    )
    largest = report.fragmentation.largest[0]
    assert (largest.rru, largest.memory_bytes) == (2.0, memory - memory // 2)


@pytest.mark.behaviour("CP11")
def test_each_machine_is_guaranteed_or_opportunistic():
    gone = UnavailabilityEvent(event_id="1", kind=EventKind.DECOMMISSION, reason="old", start=0)
    loan, own_loan = Loan(donor="", since=0), Loan(donor="e", since=0)
    region = [
        machine("m1", "e"),
        machine("m2", "e"),
        machine("m3", "batch", loan=loan),
        machine("m4", "batch", loan=own_loan),
        machine("m5", "e", state=MachineState.DOWN),
        machine("m6", unavailability=(gone,)),
        *(machine(f"f{i}") for i in range(4)),
    ]
    used = {"m1": Used(1.0, GIB), "m3": Used(1.0, GIB), "m5": Used(1.0, GIB)}
    split = capacity_report(region, [entitlement("e", machines=7)], used, now=0).split
    assert split.all.machines == 10
    assert split.guaranteed.machines == 1
    assert split.lent.machines == 2
    assert split.idle.machines == 1
    assert split.unusable.machines == 2
    assert split.unused_quota.machines == 3  # of 7 it owns m1, m2, m4 (lent) and m5
    assert split.buffer.machines == 1
    assert (split.guaranteed_share, split.opportunistic_share) == (0.125, 0.875)


@pytest.mark.behaviour("CP11")
@given(
    st.lists(
        st.builds(
            machine,
            st.uuids().map(str),
            st.sampled_from(["", "a", "b", "gone"]),
            st.sampled_from([BIG, SMALL]),
            state=st.sampled_from(MachineState),
            loan=st.sampled_from([None, Loan(donor="a", since=0), Loan(donor="", since=0)]),
        ),
        max_size=12,
    ),
    st.integers(1, 20),
    st.booleans(),
)
def test_every_machine_is_in_one_class_and_every_sum_is_the_whole(region, quota, busy):
    granted = [entitlement("a", "x/y", machines=quota), entitlement("b", "x", rru=quota / 2)]
    used = {m.machine: Used(0.5, GIB) for m in region if busy and m.entitlement}
    report = capacity_report(region, granted, used, now=0)
    split = report.split
    parts = (split.guaranteed, split.lent, split.idle, split.unused_quota, split.buffer)
    parts = (*parts, split.unusable)
    assert sum(p.machines for p in parts) == split.all.machines == len(region)
    assert sum(p.rru for p in parts) == pytest.approx(split.all.rru, abs=0.01)
    for lines in (report.types, report.datacenters, report.msbs):
        assert sum(line.all.machines for line in lines) == len(region)
        assert all(line.held.machines + line.free.machines == line.all.machines for line in lines)
    whole = sum(e.held.machines for e in report.entitlements)
    assert by_name(report.units)[""].held.machines == by_name(report.units)["x"].held.machines
    assert by_name(report.units)[""].held.machines == whole


def test_an_empty_region_has_an_empty_report():
    report = capacity_report([], [], {}, now=5.0)
    assert (report.at, report.split.all.machines, report.units) == (5.0, 0, [])


@pytest.mark.behaviour("MO16", "CP8")
def test_owners_of_small_entitlements_see_what_stacking_saves():
    machines = [machine(f"m{n}", f"e{n}") for n in range(5)]
    used = {f"m{n}": Used(1.0, 8 * GIB) for n in range(5)}
    entitlements = [
        entitlement("e0", machines=1),
        entitlement("e1", machines=1),
        entitlement("e2", machines=1),
        entitlement("e3", machines=1, host_profile="gpu"),
        entitlement("e4", machines=100),  # large tasks have separate machines
        entitlement("e5", machines=1, materialization="e0"),  # these tasks stack already
    ]
    found = capacity_report(machines, entitlements, used, now=0).fragmentation

    (stack,) = found.stacks
    assert stack.entitlements == ["e0", "e1", "e2"]
    assert (stack.held, stack.needed, found.stacks_save) == (3, 1, 2)  # 3 RRU of 4
    full = dict.fromkeys(used, FULL)
    assert capacity_report(machines, entitlements, full, now=0).fragmentation.stacks == []
