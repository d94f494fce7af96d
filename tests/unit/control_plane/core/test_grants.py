"""Quotas: what pools may hold, what a region can promise, and which sum is exceeded."""

import time

import pytest

from agent.api import Location
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.machines import (
    EventKind,
    Hardware,
    MachineRecord,
    MachineState,
    UnavailabilityEvent,
)
from control_plane.api.policy import Overcommit
from control_plane.portal.core.grants import (
    MachineClass,
    shortage,
    unkept,
)
from control_plane.portal.core.pools import (
    MICRO,
    HeldCapacity,
    Quota,
    members,
    pool_of,
    pool_quotas,
)
from control_plane.portal.core.raises import asks_for_more
from control_plane.portal.supply import SupplyIndex

SKYLAKE = MachineClass("skylake", "dc1", MICRO)
ICELAKE = MachineClass("icelake", "dc1", 2 * MICRO)
MILAN = MachineClass("milan", "dc2", 4 * MICRO)
SUPPLY = {SKYLAKE: 140, ICELAKE: 50, MILAN: 30_000}


def spec(**fields) -> EntitlementSpec:
    return EntitlementSpec(**fields)


def machine(name: str, kind: str = "skylake", rru: float = 1.0, **fields) -> MachineRecord:
    return MachineRecord(
        machine=name,
        location=Location(datacenter="dc1"),
        machine_type=kind,
        hardware=Hardware(rru=rru),
        **fields,
    )


@pytest.mark.behaviour("MO7", "CP1")
def test_thirty_thousand_machines_are_granted_where_they_are():
    assert shortage("unit", spec(machines=30_000), {}, SUPPLY) is None
    assert shortage("unit", spec(machines=30_191), {}, SUPPLY) is not None


@pytest.mark.behaviour("CP1", "CP10", "MO6")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            spec(machines=30, machine_types=["skylake"]),
            "type skylake in dc1: 120 machines granted to others + 30 machines asked"
            " > 140 machines",
        ),
        (
            spec(machines=90, datacenter="dc1"),
            "types icelake, skylake in dc1: 120 machines granted to others + 90 machines asked"
            " > 190 machines",
        ),
        (
            spec(machines=30_090),
            "the whole region: 120 machines granted to others + 30,090 machines asked"
            " > 30,190 machines",
        ),
        (
            spec(per_type={"skylake": 10, "icelake": 60}),
            "type icelake in dc1: nothing granted to others + 60 machines asked > 50 machines",
        ),
        (
            spec(machines=65, per_type={"skylake": 10, "icelake": 60}),
            "type icelake in dc1: nothing granted to others + 55 machines asked > 50 machines",
        ),
        (
            spec(rru=130.0, datacenter="dc1"),
            "types icelake, skylake in dc1: 120 machines granted to others + 130 RRU asked"
            " > 190 machines and 240 RRU in the same machines, by 10 machines",
        ),
        (
            spec(rru=101.0, machine_types=["icelake"]),
            "type icelake in dc1: nothing granted to others + 101 RRU asked > 100 RRU",
        ),
        (
            spec(machines=1, machine_types=["milan"], datacenter="dc1"),
            "types milan in dc1: nothing granted to others + 1 machines asked > 0 machines",
        ),
    ],
)
def test_a_refusal_names_the_machines_and_the_sum(wanted, message):
    specs = {"others": spec(machines=120, machine_types=["skylake"])}
    found = shortage("web", wanted, specs, SUPPLY)
    assert str(found) == message


def test_a_refusal_reports_the_available_amount():
    found = shortage("web", spec(machines=191, datacenter="dc1"), {}, SUPPLY)
    assert found.hint == "190 machines of these could be granted"


@pytest.mark.behaviour("CP7")
def test_a_quota_of_any_type_leaves_room_for_a_quota_of_one_type():
    """A greedy sum would refuse. The check has to count the flexible quota on icelake machines."""
    specs = {"flexible": spec(machines=150, machine_types=["skylake", "icelake"])}
    assert shortage("fixed", spec(machines=40, machine_types=["skylake"]), specs, SUPPLY) is None
    assert shortage("fixed", spec(machines=41, machine_types=["skylake"]), specs, SUPPLY)


@pytest.mark.behaviour("CP1")
def test_machines_that_are_down_count_and_those_that_go_away_do_not():
    leaving = UnavailabilityEvent(
        event_id="1", kind=EventKind.DECOMMISSION, reason="old", start=9e9
    )
    region = [
        machine("m1"),
        machine("m2", state=MachineState.DOWN),
        machine("m3", unavailability=(leaving,)),
        machine("m4", kind="icelake", rru=2.0),
    ]
    index = SupplyIndex()
    for record in region:
        index.on_machine_change(record.machine, None, record)
    assert index.counts() == {SKYLAKE: 2, ICELAKE: 1}


@pytest.mark.behaviour("CP7")
def test_entitlements_that_lost_machines_are_named_and_others_may_grow():
    specs = {"a": spec(machines=140, machine_types=["skylake"]), "b": spec(machines=9)}
    less = SUPPLY | {SKYLAKE: 100}
    assert set(unkept(specs, less)) == {"a"}
    assert shortage("b", spec(machines=20_000), specs, less) is None
    assert shortage("b", spec(machines=1, machine_types=["skylake"]), specs, less)


@pytest.mark.behaviour("CP6", "CP12")
@pytest.mark.parametrize(
    ("more", "before", "after"),
    [
        (True, {"machines": 3}, {"machines": 4}),
        (False, {"machines": 3}, {"machines": 2}),
        (False, {"machines": 3}, {"machines": 3, "host_profile": "web"}),
        (False, {"machines": 3}, {"machines": 3, "rru": 9.0}),
        (True, {"machines": 3, "rru": 9.0}, {"machines": 3}),
        (True, {"machines": 3}, {"rru": 3.0}),
        (True, {"rru": 3.0}, {"rru": 3.0, "machines": 99}),
        (False, {"rru": 3.0}, {"rru": 2.5}),
        (True, {"machines": 3}, {"machines": 3, "machine_types": ["a"]}),
        (True, {"machines": 3, "machine_types": ["a"]}, {"machines": 3}),
        (True, {"machines": 3}, {"machines": 3, "datacenter": "dc1"}),
        (False, {"per_type": {"a": 3, "b": 2}}, {"per_type": {"a": 3}}),
        (True, {"per_type": {"a": 3}}, {"per_type": {"a": 2, "b": 1}}),
        (
            True,
            {"machines": 4, "per_type": {"a": 3, "b": 2}},
            {"machines": 4, "per_type": {"a": 4}},
        ),
        (True, {"machines": 3}, {"machines": 3, "priority": 900}),
        (False, {"machines": 3}, {"machines": 3, "priority": 100}),
        (True, {"machines": 3}, {"machines": 3, "business_unit": "ads"}),
        (True, {"machines": 3}, {"machines": 2, "overcommit": Overcommit(cpu=2.0)}),
        (True, {"machines": 3}, {"machines": 2, "materialization": "big"}),
    ],
)
def test_a_change_that_takes_nothing_from_others_is_no_growth(more, before, after):
    assert asks_for_more(spec(**before), spec(**after)) is more
    assert asks_for_more(None, spec(**after))


@pytest.mark.behaviour("MO16")
def test_two_reservations_stack_on_one_materialization():
    specs = {
        "shared": spec(machines=1000, per_type={"skylake": 1000}, host_profile="web"),
        "ads": spec(machines=30, per_type={"skylake": 30}, materialization="shared"),
        "feed": spec(machines=12, per_type={"skylake": 12}, materialization="shared"),
        "own": spec(machines=5),
    }
    assert {pool_of(name, s) for name, s in specs.items()} == {"shared", "own"}
    assert members(specs) == {"shared": ["shared", "ads", "feed"], "own": ["own"]}
    assert pool_quotas(specs)["shared"] == Quota(1042, {"skylake": 1042})
    assert pool_quotas(specs)["own"] == Quota(5)
    room = {SKYLAKE: 1042, MILAN: 5}
    assert unkept(specs, room) == {}
    found = shortage(
        "feed", spec(machines=13, per_type={"skylake": 13}, materialization="shared"), specs, room
    )
    assert found is not None


@pytest.mark.behaviour("MO6", "CP3")
def test_a_quota_in_rru_and_one_by_type_are_both_enforced():
    quota = Quota(machines=4, per_type={"a": 2, "b": 3}, rru=10.0)
    held = HeldCapacity()
    for machine_type, rru in (("a", 1.5), ("a", 1), ("b", 1), ("b", 6.5)):
        held.add(machine_type, rru)
    assert not quota.excess(held)
    held.add("c", 0.1)
    assert quota.excess(held) == [
        "5 machines of 4",
        "10.1 RRU of 10",
        "1 machines of type c of 0",
    ]


@pytest.mark.behaviour("CP10")
def test_a_pool_of_types_and_a_data_center_allows_no_others():
    quota = pool_quotas({"e": spec(machines=3, machine_types=["a"], datacenter="dc1")})["e"]
    assert quota.allows("a", "dc1", "west")
    assert not quota.allows("a", "dc2", "west")
    assert not quota.allows("b", "dc1", "west")


@pytest.mark.behaviour("SH13")
def test_a_pool_of_a_region_and_a_data_center_allows_machines_in_both():
    quota = pool_quotas({"x": spec(machines=9, region="west", datacenter="dc1")})["x"]
    assert quota.allows("a", "dc1", "west")
    assert not quota.allows("a", "dc2", "west")
    assert not quota.allows("a", "dc1", "east")


@pytest.mark.behaviour("SH13")
def test_machines_promised_in_one_region_are_short_only_there():
    """A global quota uses what regional quotas leave, in the same data center or in others."""
    west = MachineClass("skylake", "dc1", MICRO, "west")
    supply = {west: 4, MachineClass("skylake", "dc1", MICRO, "east"): 6}
    specs = {"pay": spec(machines=3, region="west")}
    assert shortage("ads", spec(machines=6, region="east"), specs, supply) is None
    assert shortage("ads", spec(machines=7), specs, supply) is None
    short = shortage("ads", spec(machines=2, region="west"), specs, supply)
    assert str(short).endswith("3 machines granted to others + 2 machines asked > 4 machines")
    assert shortage("ads", spec(machines=8), specs, supply) is not None
    nowhere = shortage("ads", spec(machines=1, region="north"), specs, supply)
    assert str(nowhere).startswith("all types in region north: ")
    assert asks_for_more(spec(machines=3, region="west"), spec(machines=3, region="east"))


@pytest.mark.behaviour("MO6")
def test_fractions_of_rru_add_up_without_an_error():
    held = HeldCapacity()
    for _ in range(10):
        held.add("a", 0.1)
    assert not Quota(rru=1.0).excess(held)
    held.add("a", 0.1)
    assert Quota(rru=1.0).excess(held)


def _computing_s(count: int) -> float:
    """Return the computing time of one check in a region with `count` entitlements."""
    types = [f"t{i}" for i in range(10)]
    supply = {MachineClass(t, f"dc{d}", MICRO): 20_000 for t in types for d in range(5)}
    specs = {
        f"e{i}": spec(
            machines=10 if i % 2 else 600,
            machine_types=[] if i % 3 else [types[i % 10], types[i % 7]],
            datacenter=None if i % 5 else f"dc{i % 4}",
        )
        for i in range(count)
    }
    started = time.process_time()
    assert shortage("more", spec(machines=50_000), specs, supply) is None
    return time.process_time() - started


@pytest.mark.behaviour("CP8")
def test_the_check_of_a_region_grows_with_its_entitlements():
    """Ten times as many cost at most 30 times the work; quadratic growth would cost 100 times."""
    assert min(_computing_s(3000) for _ in range(3)) < 30 * min(_computing_s(300) for _ in range(3))
