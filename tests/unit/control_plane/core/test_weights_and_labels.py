"""Preferences by labels and sizes of machines, and spread in proportion to weights."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from regions import (
    FREE,
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

from control_plane.allocator.core import spread
from control_plane.allocator.core.preferences import DEFAULT
from control_plane.allocator.core.weighted_spread import EvenSpread
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.api.validate import job_spec
from wire.errors import InvalidInput

ZONE = "label.zone"


def labelled(pool: str = "e1", each: int = 10, **zones: int) -> RegionIndex:
    """Return machines like `a3` in one MSB: zone and number; those of zone `none` have no label."""
    index = RegionIndex()
    for zone, number in zones.items():
        labels = (("zone", zone),) if zone != "none" else ()
        for i in range(number):
            room = {"cpus": float(each), "rru": float(each), "memory_bytes": each << 30}
            add(index, f"{zone}{i}", pool=pool, labels=labels, rack=f"rack{i}", **room)
    return index


def by_zone(index: RegionIndex, tasks: int, *preferences: Preference) -> dict[str, int]:
    allocate(index, a_request(tasks, preferences=preferences), Allowance())
    check(index)
    return dict(Counter(name.rstrip("0123456789") for name in where(index).values()))


def prefer(*values: str, property_: str = ZONE, strategy=Strategy.PREFER) -> Preference:
    return Preference(property=property_, strategy=strategy, values=list(values))


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("pool", ["e1", FREE])
def test_tasks_are_spread_over_the_values_of_a_label(pool):
    """Machines without the label form a separate bin."""
    index = labelled(pool, a=4, b=1, none=2)
    assert by_zone(index, 9, Preference(property=ZONE)) == {"a": 3, "b": 3, "none": 3}


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize(
    ("preference", "found"),
    [
        (prefer("b", "a"), {"b": 10, "a": 2}),
        (Preference(property=ZONE, strategy=Strategy.PACK), None),
        (Preference(property=ZONE, at_most=2), {"a": 2, "b": 2, "none": 2}),
        (Preference(property=ZONE, max_skew=1), {"a": 4, "b": 4, "none": 4}),
    ],
)
def test_every_strategy_knows_labels(pool, preference, found):
    made = by_zone(labelled(pool, a=2, b=1, none=1), 12, preference)
    if found is None:
        assert len(made) == 2
        assert max(made.values()) >= 10
    else:
        assert made == found


@pytest.mark.parametrize("pool", ["e1", FREE])
def test_machines_of_a_label_are_avoided_while_there_are_others(pool):
    index = labelled(pool, a=2, b=1, none=1)
    avoiding = prefer("a", strategy=Strategy.AVOID)
    assert "a" not in by_zone(index, 20, avoiding)
    assert by_zone(index, 25, avoiding) == {"a": 5, "b": 10, "none": 10}


def test_a_label_is_a_preference_like_any_other_in_their_order():
    index = labelled(a=2, b=2)
    preferences = (prefer("b"), Preference(property=Property.RACK))
    assert by_zone(index, 4, *preferences) == {"b": 4}
    assert Counter(where(index).values()) == {"b0": 2, "b1": 2}


@pytest.mark.parametrize(
    ("property_", "field", "values"),
    [
        ("gpus", "gpus", (2, 8)),
        ("cpus", "cpus", (4.0, 64.0)),
        ("memory", "memory_bytes", (4 << 30, 64 << 30)),
        ("memory", "memory_bytes", (64 << 30, 65 << 30)),  # all are in one bucket
        ("network_mbps", "network_mbps", (1000, 25_000)),
        ("power_w", "power_w", (300, 900)),
        ("disk", "disk_bytes", (1 << 40, 8 << 40)),
        ("disk", "disk_bytes", (64 << 40, 65 << 40)),
        ("rru", "rru", (4.0, 8.0)),
    ],
)
def test_machines_are_distinguished_by_their_properties(property_, field, values):
    """All machines have one type and one MSB; only their sizes differ."""
    index = RegionIndex()
    for number, value in enumerate(values):
        add(index, [f"m{number}-{i}" for i in range(3)], **{field: value})
    allocate(index, a_request(6, preferences=(Preference(property=property_),)))
    assert Counter(name[:2] for name in where(index).values()) == {"m0": 3, "m1": 3}
    sizes = {"memory": f"{int(values[1]) >> 30}GiB", "disk": f"{int(values[1]) >> 40}TiB"}
    second = sizes.get(property_, f"{values[1]:g}")
    allocate(index, a_request(2, "other", preferences=(prefer(second, property_=property_),)))
    assert {name[:2] for name in where(index, "other").values()} == {"m1"}


@pytest.mark.behaviour("AL7")
@pytest.mark.parametrize("pool", ["e1", FREE])
@pytest.mark.parametrize(
    ("theirs", "weights", "tasks", "found"),
    [
        ("Nomad spread 70/30", {"a": 70, "b": 30}, 10, {"a": 7, "b": 3}),
        ("Nomad spread 50/50", {"a": 50, "b": 50}, 10, {"a": 5, "b": 5}),
        ("Nomad spread 100 percent in one: the rest gets little", {"a": 100}, 10, {"a": 10}),
        ("one task goes where most belong", {"a": 3, "b": 1}, 1, {"a": 1}),
        ("a bin without a given weight has weight 1", {"a": 3}, 8, {"a": 6, "b": 2}),
        ("a full bin leaves the others its part", {"a": 9, "b": 1}, 30, {"a": 20, "b": 10}),
    ],
)
def test_tasks_are_spread_in_proportion_to_weights(pool, theirs, weights, tasks, found):
    index = labelled(pool, a=2, b=2)
    assert by_zone(index, tasks, Preference(property=ZONE, weights=weights)) == found, theirs


def test_weights_of_msbs_name_them_as_people_do():
    index = RegionIndex()
    for msb in ("msb1", "msb2", "msb3"):
        add(index, [f"{msb}-{i}" for i in range(9)], msb)
    preference = Preference(property=Property.MSB, weights={"msb1": 2, "dc1/msb2": 1})
    allocate(index, a_request(20, preferences=(preference, *DEFAULT)))
    assert Counter(n[:4] for n in where(index).values()) == {"msb1": 10, "msb2": 5, "msb3": 5}


def test_shares_are_as_near_to_the_weights_as_whole_tasks_can_be():
    rng = random.Random(11)
    for _ in range(30):
        weights = {zone: rng.randint(1, 1000) for zone in "abcd"}
        tasks = rng.randint(1, 60)
        index = labelled(each=60, a=1, b=1, c=1, d=1)
        found = by_zone(index, tasks, Preference(property=ZONE, weights=weights))
        heights = {z: Fraction(2 * found.get(z, 0) + 1, weights[z]) for z in weights}
        lasts = [Fraction(2 * n - 1, weights[z]) for z, n in found.items()]
        assert max(lasts) <= min(heights.values())


def test_a_requested_uneven_spread_is_not_repaired_and_shrinks_as_it_grew():
    index = labelled(a=2, b=2)
    preference = (Preference(property=ZONE, weights={"a": 3}),)
    assert by_zone(index, 8, *preference) == {"a": 6, "b": 2}
    over, claims = spread.even_spread(preference), list(index.claims["web"])
    assert over == EvenSpread(ZONE, (("a", 3),))
    assert spread.unevenness(claims, over, ["b"]) is None
    gone = spread.fullest_first(claims, over, 4)
    left = Counter(c.machine.name[0] for c in claims if c.task not in gone)
    assert left == {"a": 3, "b": 1}


def test_tasks_that_left_a_heavy_bin_return_to_it():
    index = labelled(a=2, b=2)
    for name in ("a0", "a1"):
        index.block(name, "is down")
    preference = (Preference(property=ZONE, weights={"a": 3}),)
    assert by_zone(index, 8, *preference) == {"b": 8}
    for name in ("a0", "a1"):
        index.block(name, "")
    over, claims = spread.even_spread(preference), list(index.claims["web"])
    assert over is not None
    request = a_request(8, preferences=preference)
    tried = spread.fullest_first(claims, over, 9)
    left = {c.machine.name for c in claims if c.task in tried}
    made = plan(index, spread.trial_request(request, tried, left), Allowance(machines=0))
    moves = spread.improving_moves(claims, over, made, 9)
    assert [(move.from_bin, move.to_bin) for move in moves] == [("b", "a")] * 6


def test_a_label_that_is_given_to_a_machine_counts_for_the_next_task():
    index = labelled(a=1, none=1)
    allocate(index, a_request(1, preferences=(prefer("b", "a"),)))
    assert where(index) == {0: "a0"}
    add(index, "none0", labels=(("zone", "b"),), cpus=10.0, rru=10.0, memory_bytes=10 << 30)
    allocate(index, a_request(2, preferences=(prefer("b", "a"),)))
    assert where(index) == {0: "a0", 1: "none0"}


def refusal(*preferences: dict[str, object]) -> str:
    body = {
        "name": "web",
        "entitlement": "e",
        "tasks": 1,
        "image": "sha256:" + "1" * 64,
        "command": ["/x"],
        "limits": {"memory_max_bytes": 1 << 30},
        "preferences": list(preferences),
    }
    with pytest.raises(InvalidInput) as caught:
        job_spec(body, "the job")
    return "; ".join(f"{e.field}: {e.reason}" for e in caught.value.errors)


@pytest.mark.parametrize(
    ("preference", "message"),
    [
        (
            {"property": "msbs"},
            "preferences[0].property: 'msbs' is not a property; did you mean msb?",
        ),
        ({"property": "label.A!"}, "preferences[0].property: 'label.A!' is not a label"),
        ({"property": "profile"}, "profile changes while tasks run"),
        ({"property": "zone"}, "'zone' is not a property"),
        (
            {"property": "msb", "strategy": "pack", "weights": {"a": 1}},
            "preferences[0].weights: only for even",
        ),
        (
            {"property": "msb", "max_skew": 1, "weights": {"a": 1}},
            "preferences[0].max_skew: cannot be combined with weights",
        ),
        ({"property": "msb", "weights": {"a": 0}}, "weights"),
        ({"property": "msb", "weights": {"a": 1001}}, "weights"),
    ],
)
def test_a_preference_without_effect_is_refused_with_a_hint(preference, message):
    assert message in refusal(preference)


def test_all_errors_of_preferences_are_reported_at_once():
    message = refusal({"property": "msbs"}, {"property": "rack", "strategy": "pack", "max_skew": 1})
    assert "preferences[0].property" in message
    assert "preferences[1].max_skew" in message


def test_a_task_takes_its_claim_at_any_weights():
    index = labelled(a=1, b=1, each=1)
    made = allocate(index, a_request(3, preferences=(Preference(property=ZONE, weights={"a": 9}),)))
    assert len(made.unplaced) == 1
    assert TASK.memory_bytes == 1 << 30
