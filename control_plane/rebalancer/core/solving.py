"""Solves one model: search, order, measure. Runs in the solver's process, or in a test's."""

from __future__ import annotations

from collections.abc import Callable

from control_plane.api.rebalancing import GoalChange
from control_plane.rebalancer.core.bound import lower_bound
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.core.ordering import ordered
from control_plane.rebalancer.core.search import LocalSearch
from control_plane.rebalancer.core.stacking import stacked
from control_plane.rebalancer.core.state import State
from control_plane.rebalancer.core.swapping import swaps


def solve(model: RegionModel, effort: Effort, clock: Callable[[], float]) -> SolverAnswer:
    """Return the best plan found within the effort; the same for the same seed and steps.

    Every score of the answer is counted again from where tasks were and will be, not from what the
    search believed. `clock` counts seconds; an effort without time reads it for the report only.
    """
    began, taken = clock(), 0

    def going() -> bool:
        nonlocal taken
        taken += 1
        if effort.steps:
            return taken <= effort.steps
        return clock() - began < effort.seconds

    state = State(model)
    before, hot, used = state.goals(), state.hot(), state.used.tobytes()
    drawn = state.power.drawn[:-1].tolist()
    search = LocalSearch(state.copy(), effort.seed, effort.moves)
    complete = search.run(going)
    bound = lower_bound(state) if effort.with_bound else None
    steps = ordered(state, search.moves)
    after = state.goals()
    scores = [GoalChange(goal=g, before=before[g], after=after[g]) for g in sorted(before)]
    used_after, drawn_after = state.used.tobytes(), state.power.drawn[:-1].tolist()
    hot_after = state.hot()
    exchanged, stacks = swaps(state, effort.swaps), stacked(state, clock)
    return SolverAnswer(
        swaps=exchanged,
        stacks=stacks,
        steps=steps,
        scores=scores,
        price=sum(step.price for step in steps),
        hot_before=hot,
        hot_after=hot_after,
        limits=dict(zip(model.pools, state.level.tolist(), strict=True)),
        drawn=list(zip(drawn, drawn_after, strict=True)),
        used=(used, used_after),
        bound=bound,
        took_s=clock() - began,
        searched=search.steps,
        is_complete=complete,
    )
