"""One plan finds all unevenly placed tasks and their targets."""

import random
from collections import Counter

import pytest
from regions import POOL, TASK, a_region, a_request, add, allocate, where

from control_plane.allocator.core import spread
from control_plane.allocator.core.planner import plan
from control_plane.allocator.core.preferences import DEFAULT
from control_plane.allocator.core.region_index import RegionIndex
from control_plane.allocator.core.request import Allowance, Group, Request
from control_plane.allocator.core.weighted_spread import OVER_MSBS, EvenSpread
from control_plane.api.policy import Preference, Property, Strategy

pytestmark = pytest.mark.behaviour("BUG-CP20")

NONE = Allowance(machines=0)


def repairs(index: RegionIndex, request: Request, most: int = 9) -> tuple[spread.Repair, ...]:
    over = spread.even_spread(request.preferences)
    claims = list(index.claims[request.job])
    assert over is not None
    tried = spread.fullest_first(claims, over, most)
    left = {c.machine.name for c in claims if c.task in tried}
    made = plan(index, spread.trial_request(request, tried, left), NONE)
    return spread.improving_moves(claims, over, made, most)


def uneven_after_a_failure() -> RegionIndex:
    """Return a region whose two failed MSBs are back, while their tasks still run in the third."""
    index = a_region(msbs=3, machines=2)
    for name in ("dc1-msb2-0", "dc1-msb2-1", "dc1-msb3-0", "dc1-msb3-1"):
        index.block(name, "is down")
    allocate(index, a_request(6))
    for name in ("dc1-msb2-0", "dc1-msb2-1", "dc1-msb3-0", "dc1-msb3-1"):
        index.block(name, "")
    return index


@pytest.mark.behaviour("BUG-CP20")
def test_tasks_that_fled_into_one_msb_have_moves_back():
    """The allocator did not repair the spread after a failure."""
    index = uneven_after_a_failure()
    found = repairs(index, a_request(6))
    assert Counter(move.to_bin for move in found) == {"dc1/msb2": 2, "dc1/msb3": 2}
    assert {move.from_bin for move in found} == {"dc1/msb1"}
    assert len(repairs(index, a_request(6), most=1)) == 1


def test_an_even_job_has_none():
    index = a_region(msbs=3, machines=2)
    allocate(index, a_request(7))
    assert repairs(index, a_request(7)) == ()


def test_no_move_gains_less_than_one_task_of_spread():
    index = a_region(msbs=2, machines=2)
    allocate(index, a_request(3))
    assert repairs(index, a_request(3)) == ()
    allocate(index, a_request(1, "full", demand=TASK))
    assert repairs(index, a_request(3)) == ()


def test_without_a_possible_gain_no_move_is_found():
    """The check without a plan agrees with the plans, over random regions."""
    answers = Counter[bool]()
    for seed in range(60):
        chance = random.Random(seed)
        index = a_region(msbs=chance.randint(2, 5), machines=2)
        names = sorted(index.machines)
        blocked = chance.sample(names, chance.randint(0, len(names) - 2))
        for name in blocked:
            index.block(name, "is down")
        request = a_request(chance.randint(1, 5))
        allocate(index, request)
        for name in blocked:
            index.block(name, "")
        found = repairs(index, request)
        may = spread.may_gain(index.claims[request.job], OVER_MSBS)
        assert may or not found, seed
        answers[may] += 1
        answers[bool(found)] += 1
    assert answers[True] > 20
    assert answers[False] > 20


def test_where_the_emptier_bin_is_full_nothing_moves():
    index = a_region(msbs=2, machines=1)
    index.block("dc1-msb2-0", "is down")
    allocate(index, a_request(4))
    index.block("dc1-msb2-0", "")
    allocate(index, a_request(4, "other"))
    assert repairs(index, a_request(4)) == ()


@pytest.mark.behaviour("BUG-CP20")
def test_tasks_on_one_machine_part_within_their_msb():
    """Five of six tasks ran on one machine, and stayed there."""
    index = a_region(msbs=1, machines=2)
    index.block("dc1-msb1-1", "is down")
    allocate(index, a_request(4))
    index.block("dc1-msb1-1", "")
    found = repairs(index, a_request(4))
    assert [move.target.machine for move in found] == ["dc1-msb1-1"] * 2


@pytest.mark.behaviour("BUG-CP20")
def test_a_scale_down_takes_from_the_fullest_domain():
    """A scale-down removed the highest indexes, regardless of their domains."""
    index = a_region(msbs=2, machines=2)
    for name in ("dc1-msb2-0", "dc1-msb2-1"):
        index.block(name, "is down")
    allocate(index, a_request(4))
    for name in ("dc1-msb2-0", "dc1-msb2-1"):
        index.block(name, "")
    allocate(index, a_request(6))
    claims = list(index.claims["web"])
    gone = spread.fullest_first(claims, OVER_MSBS, 2)
    left = Counter(c.machine.place.msb for c in claims if c.task not in gone)
    assert left == {"dc1/msb1": 2, "dc1/msb2": 2}
    assert sorted(spread.fullest_first(claims, OVER_MSBS, 99)) == list(range(6))


@pytest.mark.behaviour("AS3")
def test_a_smaller_size_empties_machines_one_after_the_other():
    """In the fullest bin, tasks leave the machine first that is nearest to being empty of all."""
    index = a_region(msbs=2, machines=3)
    allocate(index, a_request(12))
    allocate(index, a_request(1, "other"))
    claims = list(index.claims["web"])
    gone = spread.fullest_first(claims, OVER_MSBS, 4, for_good=True)
    left = Counter(c.machine.name for c in claims if c.task not in gone)
    shared = {c.machine.name for c in index.claims["other"]}
    emptied = {c.machine.name for c in claims} - left.keys()
    assert len(emptied) == 2
    assert not emptied & shared
    msbs = Counter(c.machine.place.msb for c in claims if c.task not in gone)
    assert set(msbs.values()) == {4}
    spread_out = spread.fullest_first(claims, OVER_MSBS, 4)
    assert len({c.machine.name for c in claims if c.task not in spread_out}) == 6


def test_of_an_even_job_the_last_tasks_go():
    index = a_region(msbs=3, machines=1)
    allocate(index, a_request(3))
    assert spread.fullest_first(index.claims["web"], OVER_MSBS, 2) == [2, 1]


def test_the_remaining_tasks_are_as_even_as_possible():
    rng = random.Random(20)
    for _ in range(50):
        index = a_region(msbs=4, machines=3)
        for machine in list(index.machines.values()):
            if rng.random() < 0.4:
                index.block(machine.name, "is down")
        allocate(index, a_request(12))
        claims = list(index.claims["web"]) if "web" in index.claims else []
        number = rng.randrange(len(claims) + 1)
        gone = spread.fullest_first(claims, OVER_MSBS, number)
        before = Counter(c.machine.place.msb for c in claims)
        after = Counter(c.machine.place.msb for c in claims if c.task not in gone)
        assert len(gone) == len(set(gone)) == number
        level = max(after.values(), default=0)
        assert all(after[msb] >= min(before[msb], level - 1) for msb in before)


def test_only_a_preference_to_be_even_is_repaired():
    even = Preference(property=Property.RACK, strategy=Strategy.EVEN)
    pack = Preference(property=Property.MSB, strategy=Strategy.PACK)
    assert spread.even_spread(DEFAULT) == OVER_MSBS
    assert spread.even_spread((pack, even)) is None
    assert spread.even_spread((even, pack)) == EvenSpread(Property.RACK)
    assert spread.even_spread(()) is None


def test_unevenness_includes_bins_without_tasks():
    index = a_region(msbs=2, machines=2)
    index.block("dc1-msb2-0", "is down")
    index.block("dc1-msb2-1", "is down")
    allocate(index, a_request(3))
    claims = list(index.claims["web"])
    assert spread.unevenness(claims, OVER_MSBS) is None
    found = spread.unevenness(claims, OVER_MSBS, ["dc1/msb2"])
    assert found == spread.Unevenness(Property.MSB, "dc1/msb1", 3, "dc1/msb2", 0)


@pytest.mark.behaviour("BUG-CP10")
def test_all_tasks_that_move_find_their_targets_in_one_plan():
    """A target search for each moved task is quadratic, so one plan covers all of them."""
    index = a_region(msbs=4, machines=50)
    allocate(index, a_request(400))
    leaving = frozenset(name for name in index.machines if name.startswith("dc1-msb1-"))
    for name in leaving:
        index.block(name, "is being taken for maintenance")
    moving = tuple(task for task, name in where(index).items() if name in leaving)
    staying = tuple(task for task in range(400) if task not in moving)
    groups = (Group(TASK, staying), Group(TASK, moving, leaving, running=False))
    request = Request("web", POOL, groups)
    made = plan(index, request, NONE)
    found = spread.targets_of(request, made, list(index.claims["web"]))
    assert found.of.keys() == set(range(400))
    assert not leaving & {target.machine for target in found.of.values()}
    counts = Counter(index.machines[t.machine].place.msb for t in found.of.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(found.of[task].machine == where(index)[task] for task in staying)


def test_a_task_without_room_has_reasons_and_no_target():
    index = a_region(msbs=1, machines=1)
    allocate(index, a_request(1))
    add(index, "m2", pool="")
    request = a_request(1, leave="dc1-msb1-0")
    claims = list(index.claims["web"])
    found = spread.targets_of(request, plan(index, request, NONE), claims)
    assert found.of == {}
    assert "1 machine: is to be emptied" in found.reasons
    found = spread.targets_of(request, plan(index, request, Allowance(machines=1)), claims)
    assert found.of == {0: spread.Target("m2", is_taken=True)}
