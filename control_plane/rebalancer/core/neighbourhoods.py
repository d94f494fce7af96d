"""Improves a placement by exact programs of parts of it, solved by HiGHS (large neighbourhoods).

Cycles of annealing come in turn with parts of the placement that are solved one by one; the best
that is found for each is kept. Annealing is quick where much is wrong, and gets stuck where
containers are full, since each of its steps has to fit. A part is all objects of some containers,
which they exchange among themselves, or objects that may go anywhere: those of few containers, some
of many, or those of groups that depend on each other. Parts grow while they are solved to their
optimum, and shrink where that is much work. The kind that gains most for the work of its solver is
tried most. Each placement keeps every constraint; the same seed and steps give the same one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from msgspec.structs import replace

from control_plane.rebalancer.core.annealing import (
    CYCLES,
    Annealing,
    answer_of,
    within,
)
from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.language import PlacementAnswer, PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.program import PlacementProgram, ProgramAnswer

_ANNEALED, _SHAKEN = 0.85, 0.92
"""Shares of the time (or steps) of each cycle at which annealing ends, and at which shakes end."""
_STEPS_OF_ONE = 20_000
"""Steps of annealing that take about as long as one part."""
_PATIENCE = 100
"""The solver of a part stops after this number of progress checks without a better solution."""
_NODES = 50
"""The most nodes of the solver's search tree that are visited for a part."""
_STUCK_S = 20.0
"""Time limit of a part in seconds, several times what a part takes on a busy host."""
_FIRST, _LEAST, _MOST = 2_500, 100, 40_000
"""Variables of a part: at first, and at least and at most."""
_WORK = 20_000
"""Iterations that a part should take at most: two or three seconds."""
_GROWN, _SHRUNK = 1.3, 0.8
"""After a part was solved to its optimum; after one that took more than `_WORK`."""
_CONTAINERS = 400
"""Containers that some objects may go to; of more a sample is taken."""
_EVEN = 0.3
"""Of the average cost: what each container counts besides its own when parts are picked."""
_KEPT = 0.9
"""What earlier parts count for how often a kind is tried, against one later."""
_EPS = 1e-9

Part = tuple[Ints, Ints]
"""Free objects, and the containers that they may go to."""


@dataclass
class _Kind:
    """One way to pick parts, and what that was worth."""

    pick: Callable[[int], Part]
    variables: float
    gained: float = 0.0
    work: float = 0.0

    def worth(self) -> float:
        """Return what its parts gained for the work of their solver."""
        return self.gained / self.work if self.work else math.inf

    def learn(self, answer: ProgramAnswer, gain: float) -> None:
        """Count one part."""
        self.gained = self.gained * _KEPT + gain
        self.work = self.work * _KEPT + answer.work
        grown = _SHRUNK if answer.work > _WORK else _GROWN if answer.is_optimal else 1.0
        self.variables = min(max(self.variables * grown, _LEAST), _MOST)


def improved(
    model: PlacementModel, clock: Callable[[], float], seconds: float, steps: int = 0, seed: int = 1
) -> PlacementAnswer:
    """Return the best placement found in `seconds`, or in a number of `steps` if given."""
    began, state = clock(), PlacementState(model)
    before, annealing = state.total(), Annealing(state, seed, quick=True)
    parts = Neighbourhoods(state, seed)

    def progress() -> float:
        taken = annealing.steps / _STEPS_OF_ONE + parts.steps
        return taken / steps if steps else (clock() - began) / seconds

    def share(number: int, of: float) -> float:
        return within(number, progress()) / of

    for number in range(len(CYCLES) if len(state.where) and len(model.containers) > 1 else 0):
        if parts.bound is None:
            annealing.cycle(number, partial(share, number, _ANNEALED))
            annealing.shake(partial(share, number, _SHAKEN))
            parts.run(progress, CYCLES[number].until)
    found = answer_of(state, state.where.copy(), before, clock() - began, parts.steps)
    return found if parts.bound is None else replace(found, bound=parts.bound, is_optimal=True)


def _passed(progress: Callable[[], float], end: float) -> bool:
    return progress() > end


class Neighbourhoods:
    """One search from where objects are."""

    def __init__(self, state: PlacementState, seed: int, variables: int = _FIRST) -> None:
        """Change nothing yet; `variables` of the first parts."""
        self.state, self.steps = state, 0
        self.bound: float | None = None
        """Known once one part was the whole."""
        self._rng = np.random.default_rng(seed)
        picks = (self._of_containers, self._of_costly, self._of_objects, self._of_groups)
        self._kinds = [_Kind(pick, variables) for pick in picks]
        self._total = state.total()
        self._tied = [
            [g for counts in state.scopes.values() for g in counts.tied(group)]
            for group in range(len(state.moved))
        ]

    def run(self, progress: Callable[[], float], until: float = 1.0) -> None:
        """Solve parts until `progress` reaches `until`, or one part was the whole and is solved.

        A part that is not solved by then is abandoned: annealing uses the time better.
        """
        self._total = self.state.total()
        while progress() < until and self.bound is None:
            self.steps += 1
            kind = self._kinds[self._picked()]
            free, containers = kind.pick(int(kind.variables))
            program = PlacementProgram(self.state, free, containers)
            end = max(until, progress())
            is_over = partial(_passed, progress, end)
            answer = program.solved(is_over, _PATIENCE, _NODES, _STUCK_S)
            if answer is None:
                kind.variables = max(kind.variables / 2, _LEAST)
                continue
            before = self._total
            self._take(free, answer.where)
            kind.learn(answer, before - self._total)
            is_whole = len(free) == len(self.state.where)
            if answer.is_optimal and is_whole and len(containers) == len(self.state.offers):
                self.bound = min(before + answer.bound, self._total)

    def _picked(self) -> int:
        """Return the kind that was worth most, and each of them now and then."""
        if self._rng.random() < 1 / 4:
            return int(self._rng.integers(len(self._kinds)))
        return int(np.argmax([kind.worth() for kind in self._kinds]))

    def _take(self, free: Ints, where: Ints) -> None:
        """Bring objects where they should be, if that keeps room and is better.

        The solver's numbers are of finite precision, so both are looked at again.
        """
        state, old = self.state, self.state.where[free]
        changed = np.nonzero(where != old)[0].tolist()
        for row in changed:
            state.move(int(free[row]), int(where[row]))
        total = state.total() if changed else self._total
        if total < self._total - _EPS and (state.held <= state.room).all():
            self._total = total
            return
        for row in changed:
            state.move(int(free[row]), int(old[row]))

    # -- parts

    def _chances(self) -> Floats:
        """Return how likely each container is picked: the more it costs, the likelier."""
        cost = np.maximum(self.state.cost, 0.0)
        cost = cost + _EVEN * cost.mean() + _EPS
        return np.asarray(cost / cost.sum())

    def _of_containers(self, variables: int) -> Part:
        """Return some containers, at least one that costs, and all objects in them."""
        picked = self._containers(self._rng.permutation(len(self.state.offers)))
        sizes = np.cumsum(self.state.number[picked]) * np.arange(1, len(picked) + 1)
        picked = np.sort(picked[: max(2, int(np.searchsorted(sizes, variables, "right")))])
        return np.nonzero(np.isin(self.state.where, picked))[0], picked

    def _of_costly(self, variables: int) -> Part:
        """Return all objects of few containers, likelier of those that cost; they go anywhere."""
        state, chances = self.state, self._chances()
        order = self._rng.choice(len(chances), len(chances), replace=False, p=chances)
        most = max(1, variables // min(len(chances), _CONTAINERS))
        number = max(1, int(np.searchsorted(np.cumsum(state.number[order]), most, "right")))
        free = np.nonzero(np.isin(state.where, order[:number]))[0]
        return free, self._places(free)

    def _of_objects(self, variables: int) -> Part:
        """Return some objects, likelier those of containers that cost; they go anywhere."""
        state = self.state
        most = variables // min(len(state.offers), _CONTAINERS)
        number = min(max(1, most), len(state.where))
        chances = self._chances()[state.where]
        free = self._rng.choice(len(state.where), number, replace=False, p=chances / chances.sum())
        free = np.sort(free)
        return free, self._places(free)

    def _of_groups(self, variables: int) -> Part:
        """Return the objects of groups that depend on each other, and of more; they go anywhere."""
        state, found, seen = self.state, list[int](), set[int]()
        number = len(state.where)
        most = min(max(1, variables // min(len(state.offers), _CONTAINERS)), number)
        chances = self._chances()[state.where]
        firsts = self._rng.choice(number, number, replace=False, p=chances / chances.sum())
        queue = deque(state.group[firsts].tolist())
        while len(found) < most:
            group = queue.popleft()
            if group not in seen:
                seen.add(group)
                found += self._rng.permutation(np.nonzero(state.group == group)[0]).tolist()
                queue.extendleft(self._tied[group])
        free = np.sort(np.array(found[:most], np.int64))
        return free, self._places(free)

    def _containers(self, order: Ints) -> Ints:
        """Return containers in an order, one that costs before all others."""
        first = int(self._rng.choice(len(order), p=self._chances()))
        return np.append(first, order[order != first])

    def _places(self, free: Ints) -> Ints:
        """Return where objects may go: all containers, or a sample of many."""
        number = len(self.state.offers)
        if number <= _CONTAINERS:
            return np.arange(number)
        sample = self._rng.choice(number, _CONTAINERS, replace=False)
        return np.union1d(sample, self.state.where[free])
