"""Solves a region's model: searches moves, orders them, and measures the result.

It runs in the solver's process, and in the process of a test.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.api.rebalancing import GoalChange
from control_plane.rebalancer.core.bound import lower_bound
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.core.ordering import ordered
from control_plane.rebalancer.core.region_state import RegionState
from control_plane.rebalancer.core.search import LocalSearch
from control_plane.rebalancer.core.stacking import proposed_stacks
from control_plane.rebalancer.core.swapping import swaps


def solve(model: RegionModel, effort: Effort, clock: Callable[[], float]) -> SolverAnswer:
    """Return the best plan found within the effort; the same for the same seed and steps.

    Every score is computed again from the placement before and after, without sums of the search.
    `clock` returns seconds. With a number of steps, it only measures the duration.
    """
    began, checks = clock(), 0

    def may_continue() -> bool:
        nonlocal checks
        checks += 1
        if effort.steps:
            return checks <= effort.steps
        return clock() - began < effort.seconds

    state = RegionState(model)
    before, hot_before, used_before = state.goals(), state.count_hot(), state.used.tobytes()
    watts_before = state.power.drawn_w[:-1].tolist()
    search = LocalSearch(state.copy(), effort.seed, effort.moves)
    is_complete = search.run(may_continue)
    bound = lower_bound(state) if effort.with_bound else None
    moves = ordered(state, search.moves)
    after, hot_after, used_after = state.goals(), state.count_hot(), state.used.tobytes()
    watts_after = state.power.drawn_w[:-1].tolist()
    exchanges = swaps(state, effort.swaps)  # last, because it moves tasks in `state`
    return SolverAnswer(
        swaps=exchanges,
        stacks=proposed_stacks(state, clock),
        moves=moves,
        scores=[GoalChange(goal=g, before=before[g], after=after[g]) for g in sorted(before)],
        price=sum(move.price for move in moves),
        hot_before=hot_before,
        hot_after=hot_after,
        limits=dict(zip(model.pools, state.pool_limits.tolist(), strict=True)),
        watts=list(zip(watts_before, watts_after, strict=True)),
        used=(used_before, used_after),
        bound=bound,
        took_s=clock() - began,
        searched=search.steps,
        is_complete=is_complete,
    )
