"""In any region, no step of a plan breaks a rule, and the plan gains what it states."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.rebalancer.core.model import (
    Effort,
    PoweredPlace,
    RegionModel,
    SolverAnswer,
    Weights,
)
from control_plane.rebalancer.core.solving import solve
from tests.rebalancer_models import Replay, a_model, total

pytestmark = pytest.mark.behaviour("RE1", "RE2", "RE4")

CHEAP = Weights(move=0.001, move_per_gib=0.0, open=0.01)


@st.composite
def models(draw: st.DrawFn) -> RegionModel:
    machines = draw(st.integers(2, 24))
    return a_model(
        draw(st.integers(0, 10_000)),
        machines,
        draw(st.integers(1, 25 * machines)),
        pools=draw(st.integers(1, 2)),
        tight=draw(st.booleans()),
        fixed=draw(st.sampled_from((0.0, 0.3, 1.0))),
        free=draw(st.integers(0, 4)),
        pinned=draw(st.booleans()),
        weights=draw(st.sampled_from((Weights(), CHEAP))),
        busy=draw(st.sampled_from((1.0, 3.0))),
    )


def solved(model: RegionModel, seed: int = 1, moves: int = 10_000) -> SolverAnswer:
    return solve(model, Effort(steps=400, seed=seed, moves=moves), clock=lambda: 0.0)


@settings(max_examples=120, deadline=None)
@given(models(), st.randoms(use_true_random=False))
def test_no_order_of_carrying_a_plan_out_breaks_a_constraint(
    model: RegionModel, order: random.Random
) -> None:
    answer = solved(model)
    steps = sorted(answer.moves, key=lambda step: (step.wave, order.random()))

    assert Replay(model).carry_out(steps) == []


@settings(max_examples=60, deadline=None)
@given(models(), st.randoms(use_true_random=False))
def test_moves_that_the_executor_leaves_out_make_no_other_of_their_wave_impossible(
    model: RegionModel, order: random.Random
) -> None:
    answer = solved(model)
    first = [step for step in answer.moves if step.wave == 0 and order.random() < 0.5]

    assert Replay(model).carry_out(first) == []


@settings(max_examples=80, deadline=None)
@given(models())
def test_a_wave_fits_while_all_of_its_tasks_claim_both_places(model: RegionModel) -> None:
    answer = solved(model)
    replay = Replay(model)
    for wave in sorted({step.wave for step in answer.moves}):
        steps = [step for step in answer.moves if step.wave == wave]
        both = Replay(model)
        both.room_cpu, both.room = list(replay.room_cpu), [list(r) for r in replay.room]
        for step in steps:
            task = both.task_of[step.job, step.task]
            both._charge(model.kinds[both.kind[task]], both.number[step.to_machine], 1)

        assert min(both.room_cpu) >= 0
        assert min(min(room) for room in both.room) >= 0
        replay.carry_out(steps)


@settings(max_examples=80, deadline=None)
@given(models())
def test_the_reported_gain_is_the_measured_gain(model: RegionModel) -> None:
    answer = solved(model)
    replay = Replay(model)
    before = replay.cost()
    replay.carry_out(answer.moves)

    assert total(answer.scores, after=False) == pytest.approx(before, abs=1e-6)
    assert total(answer.scores, after=True) == pytest.approx(replay.cost(), abs=1e-6)
    assert sum(step.gain for step in answer.moves) == pytest.approx(answer.gain, abs=1e-6)
    assert answer.gain >= answer.price or not answer.moves


@settings(max_examples=60, deadline=None)
@given(models())
def test_no_plan_is_better_than_the_bound(model: RegionModel) -> None:
    """Tasks on machines that accept no more of them may stay there, in the bound as well."""
    answer = solved(model)

    assert answer.bound is not None
    assert total(answer.scores, after=True) >= answer.bound - 1e-6


@settings(max_examples=30, deadline=None)
@given(models(), st.integers(0, 5), st.integers(0, 10))
def test_the_same_seed_finds_the_same_plan_and_no_more_moves_than_requested(
    model: RegionModel, seed: int, moves: int
) -> None:
    one, two = solved(model, seed, moves), solved(model, seed, moves)

    assert one == two
    assert len(one.moves) <= moves


@pytest.mark.behaviour("RE6")
@settings(max_examples=40, deadline=None)
@given(models(), st.integers(1, 4), st.floats(0.3, 1.1))
def test_the_gain_in_power_equals_plain_arithmetic(
    model: RegionModel, number: int, share: float
) -> None:
    """Holds for any set of places with budgets, on two levels."""
    machines = len(model.machines)
    watts = [10.0 + 5.0 * (m % 3) for m in range(machines)]
    levels = [
        [m % number for m in range(machines)],
        [-1 if m % 2 else number for m in range(machines)],
    ]
    replay = Replay(model)

    def drawn() -> list[float]:
        found = [100.0] * (number + 1)
        for task, machine in enumerate(replay.where):
            for level in levels:
                if level[machine] >= 0:
                    found[level[machine]] += watts[machine] * replay.load[3 * task]
        return found

    before = drawn()
    places = [PoweredPlace(f"p{at}", w * share, 100.0, 50.0) for at, w in enumerate(before)]
    answer = solved(replace(model, places=places, places_of=levels, watts_per_rru=watts))
    assert replay.carry_out(answer.moves) == []
    after = drawn()
    (score,) = [each for each in answer.scores if each.goal == "power above budgets"]
    costs = [
        sum(
            model.weights.power * max(0.0, w - place.limit_w) / place.machine_w
            for w, place in zip(all_of, places, strict=True)
        )
        for all_of in (before, after)
    ]

    assert [score.before, score.after] == pytest.approx(costs, abs=1e-6)
    assert [w for pair in answer.watts for w in pair] == pytest.approx(
        [w for pair in zip(before, after, strict=True) for w in pair]
    )
    assert sum(step.power_gain for step in answer.moves) == pytest.approx(
        costs[0] - costs[1], abs=1e-6
    )
    assert answer.gain >= answer.price or not answer.moves
