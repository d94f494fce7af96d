"""Solves a small placement model exactly, as a mixed-integer program of all objects on HiGHS.

The result is an optimum, or the best placement and the bound that are known when the time is over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from control_plane.rebalancer.core.annealing import answer_of
from control_plane.rebalancer.core.language import PlacementAnswer, PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.program import PlacementProgram

VARIABLES_MAX = 50_000
"""The most objects times containers; of larger models parts are solved (`neighbourhoods`)."""
_STUCK_S = 30.0
"""Seconds after its time limit at which a solver that cycles in one linear program is stopped."""


def optimum(model: PlacementModel, clock: Callable[[], float], seconds: float) -> PlacementAnswer:
    """Return the best placement and a bound; raises `ValueError` above `VARIABLES_MAX`."""
    if len(model.objects) * len(model.containers) > VARIABLES_MAX:
        raise ValueError(f"more than {VARIABLES_MAX} variables")
    began, state = clock(), PlacementState(model)
    before, where = state.total(), state.where.copy()
    every = np.arange(len(where)), np.arange(len(state.offers))
    answer = None
    if len(where):
        program = PlacementProgram(state, *every)
        answer = program.solved(lambda: clock() - began >= seconds, most_s=seconds + _STUCK_S)
        if answer is not None:
            where = answer.where
    made = answer_of(state, where, before, clock() - began)
    if answer is None:
        return made
    return replace(made, bound=before + answer.bound, is_optimal=answer.is_optimal)
