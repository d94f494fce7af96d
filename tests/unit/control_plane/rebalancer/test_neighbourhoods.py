"""Parts of a placement are solved exactly, one after the other."""

from __future__ import annotations

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pytest_mock import MockerFixture

from control_plane.rebalancer.core import exact, neighbourhoods
from control_plane.rebalancer.core.annealing import Annealing
from control_plane.rebalancer.core.language import (
    Above,
    PlacementAnswer,
    PlacementModel,
    UsedContainers,
)
from control_plane.rebalancer.core.neighbourhoods import Neighbourhoods, improved
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.program import PlacementProgram
from tests.bench.roadef import checked, generated, read_instance

pytestmark = pytest.mark.behaviour("RE2", "RE4")


def steps(model: PlacementModel, number: int, seed: int = 1) -> PlacementAnswer:
    return improved(model, lambda: 0.0, 1.0, steps=number, seed=seed)


def placed(model: PlacementModel, state: PlacementState) -> dict[str, str]:
    at = state.where.tolist()
    return {o.name: model.containers[m].name for o, m in zip(model.objects, at, strict=True)}


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000))
def test_a_part_is_counted_as_the_whole_is_and_keeps_all_constraints(seed: int) -> None:
    """Objects that stay count in capacities, group rules, and each kind of goal."""
    base, chance = read_instance(*generated(seed, 8, 30)), np.random.default_rng(seed)
    goals = [
        *base.goals,
        Above(dimension="r0", scope="location", share=0.3),
        UsedContainers(weight=500.0),
    ]
    model = replace(base, goals=goals)
    state = PlacementState(model)
    for _ in range(3):
        free = np.sort(chance.choice(30, 12, replace=False))
        containers = np.union1d(state.where[free], chance.choice(8, 2))
        before = state.total()

        answer = PlacementProgram(state, free, containers).solved(lambda: False)

        assert answer is not None
        assert answer.is_optimal
        for i, m in zip(free.tolist(), answer.where.tolist(), strict=True):
            state.move(i, m)
        assert state.total() == pytest.approx(before + answer.bound, rel=1e-6, abs=1e-3)
        assert state.total() <= before + 1e-6
        assert checked(base, placed(model, state))[1] == []


def test_a_model_that_is_one_part_is_solved_to_its_optimum() -> None:
    model = read_instance(*generated(5, 5, 12))

    answer = steps(model, 20)

    assert answer.is_optimal
    assert answer.bound == pytest.approx(answer.after, rel=1e-6)


def test_parts_improve_what_annealing_leaves_and_break_nothing() -> None:
    model = read_instance(*generated(7, 8, 40))
    state = PlacementState(model)
    annealing = Annealing(state, 1)
    annealing.run(lambda: annealing.steps / 2_000)
    before, search = state.total(), Neighbourhoods(state, 1, variables=100)

    search.run(lambda: search.steps / 12)

    after, wrong = checked(model, placed(model, state))
    assert wrong == []
    assert after == pytest.approx(state.total())
    assert after < before


def test_a_part_is_broken_off_when_the_share_of_time_for_parts_is_over() -> None:
    """Annealing has the rest of the time. Here the part is the whole model, so a finished search
    would know its optimum."""
    state = PlacementState(read_instance(*generated(7, 8, 40)))
    search, times = Neighbourhoods(state, 1, variables=10_000), iter([0.0, 0.0])

    search.run(lambda: next(times, 0.5), until=0.3)

    assert search.steps == 1
    assert search.bound is None


@pytest.mark.behaviour("BUG-CP64")
def test_a_part_ends_while_its_solver_asks_nothing(mocker: MockerFixture) -> None:
    """Formerly the solver cycled for minutes in one LP of a2_4, beyond the end of the search."""
    state = PlacementState(read_instance(*generated(5, 5, 12)))
    mocker.patch.object(neighbourhoods, "_STUCK_S", 0.0)
    search = Neighbourhoods(state, 1, variables=10_000)

    search.run(lambda: search.steps / 3)

    assert search.steps == 3
    assert search.bound is None


@pytest.mark.behaviour("BUG-CP64")
def test_a_small_model_ends_while_its_solver_asks_nothing(mocker: MockerFixture) -> None:
    """The clock of the search does not advance, but the clock of the solver does."""
    mocker.patch.object(exact, "_STUCK_S", -1.0)
    model = read_instance(*generated(5, 5, 12))

    assert exact.optimum(model, lambda: 0.0, 60.0).is_optimal
    assert not exact.optimum(model, lambda: 0.0, 1.0).is_optimal


def test_the_same_seed_and_steps_give_the_same_placement() -> None:
    model = read_instance(*generated(3, 6, 30))

    assert steps(model, 2) == steps(model, 2)


def test_a_program_is_solved_after_a_bound_in_the_same_process() -> None:
    """HiGHS has one scheduler per process: a program with another number of threads ends without an
    answer."""
    highspy.Highs.resetGlobalScheduler(True)
    bound = highspy.Highs()  # type: ignore[no-untyped-call]
    bound.silent()
    bound.addVar(0.0, 1.0)
    bound.run()
    state = PlacementState(read_instance(*generated(5, 5, 12)))

    answer = PlacementProgram(state, np.arange(12), np.arange(5)).solved(lambda: False)

    assert answer is not None
    assert answer.is_optimal
