"""A job's own preferences come before the default spread, and replace it only if they say so."""

from collections import Counter

import pytest
from regions import POOL, RegionIndex, a_region, a_request, add, allocate

from agent.api import Limits
from control_plane.allocator.core import spread
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.preferences import DEFAULT, preferences_of
from control_plane.allocator.core.request import Allowance
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Preference, Property, Strategy

MACHINE = Preference(property=Property.MACHINE, at_most=1)
IMAGE = "sha256:" + "a" * 64
LIMITS = Limits(memory_max_bytes=1 << 30)


def liked(property_: Property, *values: str, strategy=Strategy.PREFER) -> Preference:
    return Preference(property=property_, strategy=strategy, values=list(values))


def preferences(own, entitlements=None) -> tuple[Preference, ...]:
    spec = JobSpec(
        name="web",
        entitlement=POOL,
        tasks=3,
        image=IMAGE,
        command=["/x"],
        limits=LIMITS,
        preferences=own,
    )
    return preferences_of(spec, EntitlementSpec(machines=9, preferences=entitlements))


def per_msb(index: RegionIndex, tasks: int, own: list[Preference] | None) -> list[int]:
    allocate(index, a_request(tasks, preferences=preferences(own)))
    return sorted(Counter(c.machine.place.msb for c in index.claims["web"]).values())


@pytest.mark.behaviour("BUG-AL26")
@pytest.mark.parametrize(
    "own",
    [
        [MACHINE],
        [Preference(property=Property.ROW)],
        [Preference(property=Property.RACK)],
        [Preference(property=Property.DATACENTER)],
        [liked(Property.GENERATION, "new")],
        [liked(Property.MACHINE_TYPE, "large", strategy=Strategy.AVOID)],
        [liked(Property.MSB, "msb9", strategy=Strategy.AVOID)],
        [liked(Property.RACK, "r9", strategy=Strategy.AVOID)],
        [Preference(property="label.zone")],
    ],
)
def test_an_explicit_preference_keeps_a_job_spread_over_msbs(own):
    """All nine tasks were in one MSB."""
    assert per_msb(a_region(msbs=3, machines=9), 9, own) == [3, 3, 3]


@pytest.mark.behaviour("BUG-AL26")
def test_preferences_of_an_entitlement_add_to_the_default_spread_as_well():
    assert preferences(None, [MACHINE]) == (MACHINE, *DEFAULT)
    assert preferences([MACHINE], [liked(Property.MSB, "msb1")]) == (MACHINE, *DEFAULT)
    assert preferences(None) == DEFAULT


def test_own_preferences_matter_more_than_the_default_spread():
    index = a_region(msbs=3, machines=9)
    assert per_msb(index, 9, [liked(Property.MSB, "msb2")]) == [9]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], ()),
        ([Preference(property=Property.MSB, weights={"msb1": 5})], DEFAULT[1:]),
        ([Preference(property=Property.MSB, strategy=Strategy.PACK)], DEFAULT[1:]),
        ([Preference(property=Property.DATACENTER, strategy=Strategy.PACK)], DEFAULT[:1]),
    ],
)
def test_a_job_replaces_the_default_spread_by_saying_otherwise(own, expected):
    assert preferences(own) == (*own, *expected)


def moves(index: RegionIndex, own: list[Preference]) -> list[tuple[str, str]]:
    """Return the source and target MSBs to which repairs would move tasks of an uneven job."""
    request = a_request(6, preferences=preferences(own))
    over, claims = spread.even_spread(request.preferences), list(index.claims["web"])
    if over is None:
        return []
    tried = spread.fullest_first(claims, over, 6)
    left = {claim.machine.name for claim in claims if claim.task in tried}
    made = plan(index, spread.trial_request(request, tried, left), Allowance(machines=0))
    return [(move.from_bin, move.to_bin) for move in spread.improving_moves(claims, over, made, 6)]


def all_in_one_msb(machines: int) -> RegionIndex:
    index = a_region(msbs=1, machines=machines)
    allocate(index, a_request(6))
    return index


@pytest.mark.behaviour("BUG-AL26")
def test_one_task_on_each_machine_is_spread_over_msbs_again():
    """A failure left such a job in one MSB permanently."""
    index = all_in_one_msb(6)
    add(index, [f"other{n}" for n in range(6)], "msb2")
    assert moves(index, [MACHINE]) == [("dc1/msb1", "dc1/msb2")] * 3


@pytest.mark.behaviour("BUG-AL26")
@pytest.mark.parametrize("property_", [Property.MSB, Property.RACK])
def test_repairs_move_no_task_off_what_its_job_prefers(property_):
    """A default behind a preference must not override it."""
    index = all_in_one_msb(2)
    add(index, ["other1", "other2"], "msb2", rack="rack2")
    value = {"msb": "msb1", "rack": "rack1"}[property_]
    assert moves(index, [liked(property_, value)]) == []
    assert moves(index, [liked(Property.GENERATION, "new")]) == [("dc1/msb1", "dc1/msb2")] * 3


@pytest.mark.behaviour("BUG-AL26")
def test_repairs_do_not_stack_tasks_of_a_job_that_is_even_over_machines():
    index = all_in_one_msb(6)
    add(index, "other", "msb2")
    even = [Preference(property=Property.MACHINE)]
    assert moves(index, even) == [("dc1/msb1", "dc1/msb2")]
