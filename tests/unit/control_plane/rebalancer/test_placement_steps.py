"""Single steps of the search: what they change and what they keep, compiled or not."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pytest_mock import MockerFixture

from control_plane.rebalancer.core import annealing
from control_plane.rebalancer.core.annealing import CYCLES, Annealing, heat_of
from control_plane.rebalancer.core.language import (
    Above,
    FitsIn,
    ModelContainer,
    ModelObject,
    MovedObjects,
    PlacementModel,
    UsedContainers,
)
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.placement_steps import EPS, compiled, run_steps, try_chain
from control_plane.rebalancer.core.step_tables import StepTables, view
from tests.bench.roadef import checked, generated, read_instance

pytestmark = pytest.mark.behaviour("RE2", "RE4")


def some_model(seed: int) -> tuple[PlacementModel, PlacementModel]:
    """Return an instance of the challenge's form, and the same instance with goals that the form
    lacks."""
    base, chance = read_instance(*generated(seed, 8, 40)), np.random.default_rng(seed)
    bound = [
        replace(o, may=[f"m{m}" for m in chance.choice(8, 4, replace=False).tolist()])
        if chance.random() < 0.2
        else o
        for o in base.objects
    ]
    more = [Above(dimension="r0", scope="location", share=0.3), UsedContainers(weight=500.0)]
    return base, replace(base, objects=bound, goals=[*base.goals, *more])


def counted(state: PlacementState) -> dict[str, object]:
    """Return the counts that moves keep up to date, computed again from scratch."""
    t, where = state.tables, state.where
    held = np.zeros_like(state.held)
    np.add.at(held, where, state.need)
    stays = (where != state.origin)[:, None] & ~state.frees_at_once
    np.add.at(held, state.origin, np.where(stays, state.need, 0.0))
    lists = []
    for m in range(len(state.offers)):
        i, members = int(t.first_object[m]), set[int]()
        while i < len(where):
            members.add(i)
            i = int(t.next_object[i])
        lists.append(members)
    moved = Counter(state.group[where != state.origin].tolist())
    return {
        "held": held.tolist(),
        "lists": lists,
        "cost": state.costs(slice(None), state.used).tolist(),
        "most moved": max(moved.values(), default=0),
        "seen": [np.count_nonzero(c.count, axis=1).tolist() for c in state.scopes.values()],
        "number": np.bincount(where, minlength=len(state.offers)).tolist(),
    }


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 300.0, 1e9]))
def test_steps_change_the_sum_as_they_say_keep_rules_and_count_right(
    seed: int, heat: float
) -> None:
    base, model = some_model(seed)
    state = PlacementState(model)
    search, before = Annealing(state, seed), state.total()

    for _ in range(5):
        search._run_block(200, heat)

        t = state.tables
        assert state.total() == pytest.approx(before + float(t.sums[0]))
        where = {o.name: f"m{m}" for o, m in zip(model.objects, state.where.tolist(), strict=True)}
        assert checked(base, where)[1] == []
        assert all(not o.may or where[o.name] in (o.at, *o.may) for o in model.objects)
        assert counted(state) == {
            "held": state.held.tolist(),
            "lists": [set(np.nonzero(state.where == m)[0].tolist()) for m in range(8)],
            "cost": pytest.approx(state.cost.tolist()),
            "most moved": int(t.registers[0]),
            "seen": t.bins_with_group.tolist(),
            "number": state.objects_in.tolist(),
        }


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_a_cycle_ends_with_the_best_placement_that_it_saw(seed: int) -> None:
    state = PlacementState(some_model(seed)[1])
    before, search = state.total(), Annealing(state, seed)

    search.cycle(0, lambda: search.steps / 2_000)

    assert state.total() == pytest.approx(before + float(state.tables.sums[1]))
    assert state.total() <= before


def test_each_cycle_cools_begins_colder_than_the_one_before_and_ends_as_cold() -> None:
    cycles = [[heat_of(cycle, done / 100) for done in range(101)] for cycle in range(len(CYCLES))]

    assert all(warm > cold for heats in cycles for warm, cold in pairwise(heats))
    assert all(before[0] > heats[0] for before, heats in pairwise(cycles))
    assert [heats[-1] for heats in cycles] == pytest.approx([cycles[0][-1]] * len(CYCLES))


def crowded(seed: int) -> PlacementModel:
    """Return a model with overloaded containers, in which moves cost almost nothing."""
    draw = random.Random(seed)
    objects = [
        ModelObject(name=f"o{n}", at=f"m{n % 6 if n < 60 else n % 12}", needs={"cpu": cpu})
        for n, cpu in enumerate(draw.randint(1, 9) for _ in range(90))
    ]
    level = 1.02 * sum(o.needs["cpu"] for o in objects) / 12
    names = [f"m{n}" for n in range(12)]
    return PlacementModel(
        objects=objects,
        containers=[ModelContainer(name=m, offers={"cpu": 400}) for m in names],
        constraints=[FitsIn(dimension="cpu")],
        goals=[
            Above(dimension="cpu", level=dict.fromkeys(names, level), weight=1e6),
            MovedObjects(each=1.0),
        ],
    )


def after_two_cycles(model: PlacementModel) -> Annealing:
    """Return a search after its first and second cycle, with 500,000 steps each."""
    search = Annealing(PlacementState(model), 1, quick=True)
    search.cycle(0, lambda: search.steps / 500_000)
    search.cycle(1, lambda: search.steps / 500_000 - 1.0)
    return search


@pytest.mark.behaviour("RE4")
def test_a_cycle_of_prices_finds_fewer_moves_that_do_the_same(mocker: MockerFixture) -> None:
    """With the heat of the cycle of amounts, objects move as if moves were free."""
    search = after_two_cycles(crowded(3))
    mocker.patch.object(annealing, "_PRICES_MIN", np.inf)
    other = after_two_cycles(crowded(3))

    assert search.state.total() == search.state.paid(), "nothing has too much"
    assert search.state.total() < other.state.total()
    assert search.state.tables.price[:-1].tolist() == search.state.price.tolist()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_a_cycle_of_prices_makes_nothing_worse(seed: int) -> None:
    state = PlacementState(some_model(seed)[1])
    before, search = state.total(), Annealing(state, seed)

    search._cycle_of_prices(lambda: search.steps / 2_000, 50)

    assert state.total() <= before + EPS
    assert state.tables.price[:-1].tolist() == state.price.tolist()


def full_and_small() -> PlacementModel:
    """Return a model in which a big object may leave its full container once small objects have
    moved."""
    small = [ModelObject(name=f"s{n}", at="m2", needs={"cpu": 3}) for n in range(3)]
    return PlacementModel(
        objects=[ModelObject(name="big", at="m1", needs={"cpu": 8}), *small],
        containers=[ModelContainer(name=m, offers={"cpu": 10}) for m in ("m1", "m2", "m3")],
        constraints=[FitsIn(dimension="cpu")],
        goals=[
            Above(dimension="cpu", level={"m1": 0.0, "m2": 10.0, "m3": 10.0}),
            MovedObjects(each=1.0),
        ],
    )


def test_a_chain_brings_an_object_to_a_container_that_others_leave_first() -> None:
    state = PlacementState(full_and_small())
    lots = view(np.array([0, 2, 2, 2]))

    assert try_chain(state.views, 0, 1, lots, -4.0) == -4.0

    assert state.where.tolist() == [1, 2, 2, 2]
    assert state.total() == 4.0


def test_a_chain_beyond_its_bar_leaves_all_where_it_was() -> None:
    state = PlacementState(full_and_small())
    lots = view(np.array([0, 2, 2, 2]))

    assert try_chain(state.views, 0, 1, lots, -4.5) == 0.0

    assert state.where.tolist() == [0, 1, 1, 1]
    assert state.held.tolist() == [[8.0], [9.0], [0.0]]


def two_full() -> PlacementModel:
    """Return a model in which no object fits elsewhere until others have moved."""
    small = [ModelObject(name=f"s{n}", at="m2", needs={"cpu": 5}) for n in range(3)]
    return PlacementModel(
        objects=[ModelObject(name="big", at="m1", needs={"cpu": 16}), *small],
        containers=[ModelContainer(name=m, offers={"cpu": 20}) for m in ("m1", "m2")],
        constraints=[FitsIn(dimension="cpu")],
        goals=[Above(dimension="cpu", level={"m1": 15.0, "m2": 16.0}), MovedObjects(each=0.125)],
    )


def test_displaced_tasks_may_take_the_place_of_the_moved_one() -> None:
    state = PlacementState(two_full())

    assert try_chain(state.views, 0, 1, view(np.array([0, 0])), 0.0) == -0.5

    assert state.where.tolist() == [1, 0, 0, 0]
    assert state.total() == 0.5


def test_a_shake_finds_what_no_single_step_does_and_ends_with_the_best() -> None:
    state = PlacementState(two_full())
    search = Annealing(state, 1)

    search.shake(lambda: search.steps / 100_000, blocks=1)

    assert state.where.tolist() == [1, 0, 0, 0]


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000))
def test_shakes_keep_rules_and_make_nothing_worse(seed: int) -> None:
    base, model = some_model(seed)
    state = PlacementState(model)
    before, search = state.total(), Annealing(state, seed)

    search.shake(lambda: search.steps / 20_000, blocks=1)

    where = {o.name: f"m{m}" for o, m in zip(model.objects, state.where.tolist(), strict=True)}
    assert checked(base, where)[1] == []
    assert state.total() <= before


def test_compiled_steps_are_the_same_as_interpreted_ones() -> None:
    model = some_model(4)[1]
    quick = compiled()
    assert quick is not None, "numba is not installed: pip install 'twine-cluster[rebalancer]'"
    one, two = (PlacementState(model) for _ in range(2))
    draw = np.random.default_rng(1)
    firsts, lots = draw.integers(40, size=5_000), draw.integers(8, size=5_000)
    seconds = draw.integers(40 + 2 * 8, size=5_000)
    bars = 100.0 * draw.standard_exponential(5_000)

    quick(one.tables, firsts, seconds, lots, bars)
    run_steps(two.views, view(firsts), view(seconds), view(lots), view(bars))

    for name in StepTables._fields:
        assert np.array_equal(getattr(one.tables, name), getattr(two.tables, name)), name
    assert not np.array_equal(one.where, one.origin)
