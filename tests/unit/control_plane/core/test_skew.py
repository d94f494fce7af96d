"""With a hard bound on skew, tasks wait before one bin gets too far ahead of another."""

import json
from collections import Counter

import pytest
from regions import (
    FREE,
    GIB,
    Allowance,
    RegionIndex,
    add,
    allocate,
    check,
    where,
)

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.request import Group, Request
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.api.requirements import Compare, Exists, In
from control_plane.api.routes import ROUTES
from wire.errors import InvalidInput
from wire.routes import decode_json

MSB = Property.MSB


def bounded(skew: int, property_: Property = MSB) -> tuple[Preference, ...]:
    return (Preference(property=property_, max_skew=skew),)


def a_room(tasks: int) -> dict[str, object]:
    """Return the fields of a machine with room for `tasks` tasks of 1 GiB and a CPU each."""
    return {"memory_bytes": tasks * GIB, "cpus": float(tasks)}


def uneven(*rooms: int, pool: str = "e1") -> RegionIndex:
    index = RegionIndex()
    for number, room in enumerate(rooms, 1):
        add(index, [f"m{number}"], f"msb{number}", pool=pool, **a_room(room))
    return index


def per_msb(index: RegionIndex, tasks: int, *preferences: Preference, **fields) -> list[int]:
    group = Group(Demand(GIB, cpus=1), tuple(range(tasks)), **fields)
    request = Request("web", "e1", (group,), preferences=preferences)
    made = allocate(index, request, Allowance())
    check(index)
    found = Counter(name for name in where(index).values())
    assert len(made.unplaced) == tasks - found.total()
    return [found[f"m{n}"] for n in range(1, 4)]


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize(
    ("theirs", "skew", "rooms", "placed"),
    [
        ("kube maxSkew=1: one domain is full", 1, (9, 1, 9), [2, 1, 2]),
        ("kube maxSkew=2", 2, (9, 1, 9), [3, 1, 3]),
        ("kube maxSkew=1: room everywhere", 1, (9, 9, 9), [3, 3, 3]),
        ("kube maxSkew=5: the bound is never met", 5, (9, 1, 9), [4, 1, 4]),
    ],
)
def test_a_full_bin_holds_up_the_others(theirs, skew, rooms, placed, pool):
    assert per_msb(uneven(*rooms, pool=pool), 9, *bounded(skew)) == placed, theirs


@pytest.mark.behaviour("AL7")
def test_without_the_bound_tasks_go_where_there_is_room():
    """By default, tasks are not left without a machine."""
    assert per_msb(uneven(9, 1, 9), 9, Preference(property=MSB)) == [4, 1, 4]


@pytest.mark.behaviour("AL7")
def test_the_bound_holds_behind_a_preference_that_matters_more():
    """The first preference would put all tasks into one MSB."""
    liked = Preference(property=MSB, strategy=Strategy.PREFER, values=["msb1"])
    assert per_msb(uneven(9, 9, 9), 9, liked, *bounded(1)) == [3, 3, 3]
    assert per_msb(uneven(9, 9, 9), 8, liked, *bounded(2)) == [4, 2, 2]


@pytest.mark.behaviour("AL7")
def test_a_bin_of_closed_machines_does_not_count():
    """An MSB that is down blocks no task; one that is full does."""
    index = uneven(9, 9)
    add(index, ["m3"], "msb3", blocked="it is down", **a_room(9))
    assert per_msb(index, 6, *bounded(1)) == [3, 3, 0]


@pytest.mark.behaviour("AL7")
def test_a_bin_that_the_requirements_exclude_does_not_count():
    """Kubernetes also counts the domains that the node affinity leaves."""
    index = uneven(9, 9)
    add(index, ["m3"], "msb3", machine_type="large", **a_room(9))
    small = Demand(GIB, cpus=1, requires=(In("machine_type", frozenset({"small"})),))
    group = Group(small, tuple(range(6)))
    made = allocate(index, Request("web", "e1", (group,), preferences=bounded(1)))
    assert not made.unplaced
    assert Counter(where(index).values()) == {"m1": 3, "m2": 3}


EXCLUDED = {
    "rack": ({"rack": "r9"}, Demand(GIB, cpus=1, requires=(In("rack", frozenset({"rack1"})),))),
    "row": ({"row": "w9"}, Demand(GIB, cpus=1, requires=(In("row", frozenset({"row1"})),))),
    "machine": ({}, Demand(GIB, cpus=1, requires=(In("machine", frozenset({"m1", "m2"})),))),
    "label": ({"labels": ()}, Demand(GIB, cpus=1, requires=(Exists("label.gold"),))),
    "capability": ({}, Demand(GIB, cpus=1, requires=(Exists("capability.nested"),))),
    "memory": (
        {"memory_bytes": 5 * GIB},
        Demand(GIB, cpus=1, requires=(Compare("memory", ">", 6 * GIB),)),
    ),
    "disk": ({}, Demand(GIB, cpus=1, requires=(Compare("disk", ">", GIB),))),
    "too little memory": ({"memory_bytes": GIB // 2}, Demand(GIB, cpus=1)),
    "too few cores": ({"cpus": 0.5}, Demand(GIB, cpus=1)),
    "too little disk": ({}, Demand(GIB, cpus=1, disk_bytes=GIB)),
}


@pytest.mark.behaviour("BUG-AL22")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize("kind", EXCLUDED)
@pytest.mark.parametrize("property_", [MSB, Property.RACK])
def test_a_bin_without_suitable_machines_blocks_no_other_bin(kind, pool, property_):
    """One task of six had a machine; without the bound all six had one."""
    fields, demand = EXCLUDED[kind]
    apt = {"labels": (("gold", "yes"),), "capabilities": frozenset({"nested"})}
    apt |= {"disk_bytes": 9 * GIB, **a_room(9)}
    index = RegionIndex()
    for number in (1, 2):
        add(index, [f"m{number}"], f"msb{number}", pool=pool, **apt)
    unapt = {"pool": pool, "rack": "rack3", **a_room(9), **fields}
    add(index, ["m3"], "msb3", **unapt)
    group = Group(demand, tuple(range(6)))
    request = Request("web", "e1", (group,), preferences=bounded(1, property_))
    made = allocate(index, request, Allowance())
    assert not made.unplaced, made.reasons
    assert Counter(where(index).values()) == {"m1": 3, "m2": 3}


@pytest.mark.behaviour("BUG-AL22")
@pytest.mark.parametrize(
    ("group", "allowance"),
    [
        ({"among": (In("msb", frozenset({"msb1", "msb2"})),)}, {}),
        ({"leave": frozenset({"m3"})}, {}),
        ({}, {"types": frozenset({"small"})}),
        ({}, {"per_type": {"small": 9}}),
    ],
)
def test_a_bin_from_which_the_tasks_are_kept_holds_up_no_other(group, allowance):
    """Tasks are kept out by the place of other jobs, because they leave the bin, or by a quota."""
    index = uneven(9, 9, pool=FREE)
    add(index, ["m3"], "msb3", machine_type="large", pool=FREE, **a_room(9))
    groups = (Group(Demand(GIB, cpus=1), tuple(range(6)), **group),)
    request = Request("web", "e1", groups, preferences=bounded(1))
    made = allocate(index, request, Allowance(**allowance))
    assert not made.unplaced, made.reasons
    assert Counter(where(index).values()) == {"m1": 3, "m2": 3}


@pytest.mark.behaviour("BUG-AL22")
def test_each_group_of_tasks_has_separate_bins():
    """Bins that only the first group could use blocked the second group."""
    index = uneven(9, 9)
    add(index, ["m3"], "msb3", generation="new", **a_room(9))
    old = Demand(GIB, cpus=1, requires=(In("generation", frozenset({""})),))
    groups = (Group(Demand(GIB, cpus=1), (0,)), Group(old, tuple(range(1, 7))))
    request = Request("web", "e1", groups, preferences=bounded(1))
    made = allocate(index, request)
    assert not made.unplaced, made.reasons


def test_staying_tasks_count_and_waiting_tasks_have_reasons():
    """A second, larger request continues from the result of the first one."""
    index = uneven(9, 1, 9)
    per_msb(index, 3, *bounded(1))
    group = Group(Demand(GIB, cpus=1), tuple(range(9)))
    made = allocate(index, Request("web", "e1", (group,), preferences=bounded(1)))
    assert Counter(where(index).values()) == {"m1": 2, "m2": 1, "m3": 2}
    assert len(made.unplaced) == 4
    assert any("more than 1 tasks ahead of the emptiest msb" in r for r in made.reasons)


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("skew", [1, 2, 3])
@pytest.mark.parametrize("each", [1, 3, 40])
def test_the_bound_holds_for_racks_too(skew, each):
    """Racks are bins that are finer than buckets."""
    index = RegionIndex()
    for rack in range(7):
        names = [f"r{rack}-{n}" for n in range(each if rack else 1)]
        add(index, names, "msb1", rack=f"r{rack}", pool="e1", **a_room(2))
    group = Group(Demand(GIB, cpus=1), tuple(range(500)))
    preferences = bounded(skew, Property.RACK)
    allocate(index, Request("web", "e1", (group,), preferences=preferences))
    tasks = Counter(name.partition("-")[0] for name in where(index).values())
    room = min(2 * each, 2 + skew)
    assert tasks == {"r0": 2} | {f"r{n}": room for n in range(1, 7)}


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize(
    ("preference", "reason"),
    [
        ({"property": "msb", "strategy": "pack", "max_skew": 1}, "only for even"),
        ({"property": "machine", "max_skew": 1}, "at_most"),
        ({"property": "msb", "max_skew": 0}, "from 1"),
    ],
)
def test_a_bound_that_means_nothing_is_refused(preference, reason):
    """The error states the place and the reason."""
    route = next(r for r in ROUTES if r.name == "apply_job")
    document = json.dumps({"preferences": [preference]}).encode()
    with pytest.raises(InvalidInput) as refused:
        decode_json(document, JobSpec, "the job", route.relations)
    found = [e for e in refused.value.errors if e.field == "preferences[0].max_skew"]
    assert [reason in e.reason for e in found] == [True], refused.value.errors
