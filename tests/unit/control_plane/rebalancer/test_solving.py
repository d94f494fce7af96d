"""Results of the search on regions small enough to read."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from control_plane.rebalancer.core.model import (
    BinRule,
    Effort,
    PoweredPlace,
    RegionModel,
    SolverAnswer,
    TaskKind,
    Weights,
)
from control_plane.rebalancer.core.solving import solve
from tests.rebalancer_models import columns, total

pytestmark = pytest.mark.behaviour("RE1", "RE2", "RE4")

GIB = 1 << 30
MICRO = 1_000_000
EVEN = [BinRule(0, True)]


def a_region(
    machines: list[list[float]],
    *,
    cores: float = 10.0,
    pools: list[int] | None = None,
    rules: list[BinRule] | None = None,
    claim_cores: float = 1.0,
    weights: Weights | None = None,
    one_job: bool = False,
    can_move: list[bool] | None = None,
    **changes: object,
) -> RegionModel:
    """Return machines of `cores` cores, each in its own MSB, whose tasks use the given numbers of
    cores."""
    tasks = [(m, load) for m, loads in enumerate(machines) for load in loads]
    pool_of = pools or [0] * len(machines)
    claim = int(claim_cores * MICRO)
    model = RegionModel(
        weights=weights or Weights(move_per_gib=0.0),
        pools=[f"pool{p}" for p in range(max(pool_of) + 1)],
        machines=[f"m{m}" for m in range(len(machines))],
        pool_of=pool_of,
        is_free=[False] * len(machines),
        is_open=[True] * len(machines),
        sizes=[(cores, 0.0, 0.0)] * len(machines),
        cpu_grains=[(1, 1)] * len(machines),
        room_cpu=[int(cores * MICRO) - claim * len(loads) for loads in machines],
        room=[(64 * GIB, 0, 0, 0, 100)] * len(machines),
        bins=[list(range(len(machines)))],
        admissions=[bytes([1] * len(machines))],
        jobs=[f"j{t}" for t in range(len(tasks))],
        rules=[rules or []] * len(tasks),
        kinds=[TaskKind(0, claim, (GIB, 0, 0, 0, 1), 0)],
        tasks=columns(
            [(0 if one_job else t, t, 0, m) for t, (m, _) in enumerate(tasks)],
            [(load, 0.0, 0.0) for _, load in tasks],
            [0.0] * len(tasks),
            can_move or [True] * len(tasks),
        ),
    )
    return replace(model, **changes)


def solved(model: RegionModel, moves: int = 100) -> SolverAnswer:
    return solve(model, Effort(steps=500, moves=moves), clock=lambda: 0.0)


def test_a_hot_machine_gives_tasks_to_an_idle_one() -> None:
    answer = solved(a_region([[3.0, 3.0, 3.0], []]))

    assert {(s.from_machine, s.to_machine) for s in answer.moves} == {("m0", "m1")}
    assert (answer.hot_before, answer.hot_after) == (1, 0)
    assert answer.moves[0].why == "cpu of m0: 90% -> 60%"


def test_nothing_moves_where_nothing_is_gained() -> None:
    assert solved(a_region([[5.0], [5.0]])).moves == []


def test_a_move_that_gains_less_than_its_price_is_not_made() -> None:
    skewed = [[3.5, 1.5], [2.0]]
    weights = Weights(move_per_gib=0.0, tolerance=0.0)

    assert solved(a_region(skewed, weights=weights)).moves != []
    assert solved(a_region(skewed, weights=replace(weights, move=0.5))).moves == []


def test_two_full_machines_swap_tasks_through_the_room_of_a_third() -> None:
    # each has room for three tasks; only the third has room for one more
    full = [[4.0, 4.0, 1.0], [0.5, 0.5, 0.5], [2.0, 2.0]]
    answer = solved(a_region(full, cores=10.0, claim_cores=10 / 3))

    assert answer.hot_after == 0
    assert len(answer.moves) >= 2


def test_two_machines_without_any_room_are_left_as_they_are() -> None:
    answer = solved(a_region([[4.5, 4.5], [0.5, 0.5]], claim_cores=5.0))

    assert answer.moves == []
    assert answer.hot_after == answer.hot_before == 1


def test_a_swap_needs_room_for_one_task_on_one_side() -> None:
    # a move alone would make the other machine hot: only both moves together help
    answer = solved(a_region([[5.0, 4.0], [3.5, 1.0]], rules=[]))

    assert sorted((s.from_machine, s.to_machine) for s in answer.moves) == [
        ("m0", "m1"),
        ("m1", "m0"),
    ]
    assert answer.hot_after == 0


def test_tasks_stay_with_their_entitlement() -> None:
    assert solved(a_region([[3.0, 3.0, 3.0], []], pools=[0, 1])).moves == []


def test_a_move_does_not_make_a_job_less_even() -> None:
    skewed = [[4.5, 4.5], [1.0, 1.0]]

    # 1 and 3 tasks would be less even than 2 and 2
    assert solved(a_region(skewed, rules=EVEN, one_job=True)).hot_after == 1
    assert solved(a_region(skewed, rules=[], one_job=True)).hot_after == 0


def test_machines_that_take_no_tasks_get_none() -> None:
    answer = solved(a_region([[3.0, 3.0, 3.0], [], []], is_open=[True, False, True]))

    assert {s.to_machine for s in answer.moves} == {"m2"}


def test_excluded_machines_get_no_task() -> None:
    answer = solved(a_region([[3.0, 3.0, 3.0], [], []], admissions=[bytes([1, 0, 1])]))

    assert {s.to_machine for s in answer.moves} == {"m2"}


def test_a_free_machine_is_taken_only_where_it_relieves_more_than_it_costs() -> None:
    crowded = [[4.0, 4.5], [4.0, 4.5], []]
    free = [False, False, True]

    assert {s.to_machine for s in solved(a_region(crowded, is_free=free)).moves} == {"m2"}
    assert solved(a_region([[5.0], [5.0], []], is_free=free)).moves == []


def test_the_bound_limits_the_remaining_gain() -> None:
    pinned = a_region([[3.0, 3.0, 3.0], []], can_move=[False, True, True])
    stuck = a_region([[9.0], []])
    answer = solved(stuck)

    assert solved(pinned).bound == pytest.approx(0.0)
    assert answer.bound == pytest.approx(0.0)  # the bound may split the task; the plan may not
    assert total(answer.scores, after=True) > 0


def test_the_bound_counts_what_cannot_move() -> None:
    answer = solved(a_region([[9.0], []], can_move=[False]))

    assert answer.bound == pytest.approx(total(answer.scores, after=True))


def test_the_bound_does_not_fill_one_closed_machine_with_the_load_of_another() -> None:
    answer = solved(a_region([[9.0], [], [9.0]], is_open=[False, False, True]))

    assert answer.moves == []
    assert answer.bound == pytest.approx(total(answer.scores, after=True))


BIG_CORES, SMALL_CORES, BIG_IN_A_RACK, SMALL_IN_A_RACK = 36.0, 18.0, 30, 92
"""The paper's two kinds of machines (§8): with two processors, or with one of 18 cores."""


@pytest.mark.behaviour("WH4", "EX13")
@pytest.mark.parametrize("small", [False, True])
def test_a_rack_of_small_machines_is_balanced_as_well_as_one_of_big_machines(small: bool) -> None:
    """The rack has half as many cores again, and no machine is hot in either rack."""
    number, cores = (SMALL_IN_A_RACK, SMALL_CORES) if small else (BIG_IN_A_RACK, BIG_CORES)
    assert SMALL_IN_A_RACK * SMALL_CORES > 1.5 * BIG_IN_A_RACK * BIG_CORES
    chance = random.Random(1)
    machines: list[list[float]] = [[] for _ in range(number)]
    while sum(map(sum, machines)) < 0.6 * number * cores:
        load = chance.choice((0.5, 1.0, 2.0, 4.0))
        fuller = machines[: number // 3] if chance.random() < 0.5 else machines
        machines[chance.randrange(len(fuller))].append(load)

    answer = solved(a_region(machines, cores=cores, claim_cores=0.1), moves=1_000)

    assert answer.hot_before > number / 5
    assert answer.hot_after == 0
    assert total(answer.scores, after=True) == pytest.approx(0.0, abs=0.05)


def powered(machines: list[list[float]], limit_w: float, **changes: object) -> RegionModel:
    """Return machines. The first two are in a place with a power budget of `limit_w`.

    Each RRU draws 10 W there. Idle machines draw 100 W.
    """
    inside = [0 if m < 2 else -1 for m in range(len(machines))]
    return a_region(
        machines,
        places=[PoweredPlace("dc1/msb1", limit_w, 200.0, 100.0)],
        places_of=[inside],
        watts_per_rru=[10.0] * len(machines),
        **changes,
    )


@pytest.mark.behaviour("RE6", "HC13", "WH10")
def test_tasks_leave_a_place_that_draws_more_than_it_bears() -> None:
    """Tasks move to another data center, although no machine is hot."""
    loads = [[2.0, 2.0], [2.0, 2.0], [1.0], [1.0]]
    level = Weights(move_per_gib=0.0, tolerance=0.5)
    answer = solved(powered(loads, limit_w=240.0, weights=level))

    assert answer.watts[0][0] == 280.0
    assert answer.watts[0][1] <= 240.0
    assert {s.to_machine for s in answer.moves} <= {"m2", "m3"}
    assert {s.why for s in answer.moves} == {"power of dc1/msb1"}
    assert all(s.power_gain > s.price for s in answer.moves)
    assert solved(powered(loads, limit_w=300.0, weights=level)).moves == []


@pytest.mark.behaviour("RE6")
def test_a_place_that_bears_no_more_gets_no_tasks() -> None:
    """Relieving a hot machine does not overload the power of another place."""
    loads = [[3.0], [], [3.0, 3.0, 3.0], []]

    assert {s.to_machine for s in solved(powered(loads, limit_w=230.0)).moves} == {"m3"}


def test_the_gain_in_power_is_counted_as_measured_after() -> None:
    answer = solved(powered([[2.0, 2.0], [2.0, 2.0], [1.0], [1.0]], limit_w=240.0))
    (score,) = [s for s in answer.scores if s.goal == "power above budgets"]

    assert score.before == pytest.approx(10.0 * 40.0 / 100.0)
    assert score.after == 0.0
    assert sum(s.gain for s in answer.moves) == pytest.approx(answer.gain)
