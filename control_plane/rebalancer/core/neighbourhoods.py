"""Improves a placement by exact programs of its parts on HiGHS (large neighbourhood search).

Cycles of annealing alternate with parts of the placement that are solved one by one. Annealing is
fast where much is wrong, and gets stuck where containers are full, since each of its steps must
fit. A part has all objects of some containers, which exchange them, or objects that may go
anywhere: those of a few containers, a sample, or those of groups that depend on each other. Parts
grow while they are solved to their optimum, and shrink when that is much work. The kind of part
that gains most for the solver's work is tried most. Every placement keeps all constraints. The same
seed and steps give the same placement.
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
    cycle_progress,
)
from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.language import PlacementAnswer, PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.program import PlacementProgram, ProgramAnswer

_ANNEALED, _SHAKEN = 0.85, 0.92
"""Shares of the time (or steps) of each cycle at which annealing and shakes end."""
_STEPS_OF_ONE = 20_000
"""Annealing steps that take about as long as one part."""
_PATIENCE = 100
"""The solver of a part stops after this number of progress checks without a better solution."""
_NODES = 50
"""The most nodes of the solver's search tree that are visited for a part."""
_STUCK_S = 20.0
"""Time limit of a part in seconds, several times what a part takes on a busy host."""
_FIRST, _LEAST, _MOST = 2_500, 100, 40_000
"""Variables of the first part, of the smallest and of the largest one."""
_WORK = 20_000
"""Iterations that a part should take at most: two or three seconds."""
_GROWN, _SHRUNK = 1.3, 0.8
"""Factors of the size after a part that was solved to its optimum, and after one above `_WORK`."""
_CONTAINERS = 400
"""The most containers to which the objects of a part may go; of more a sample is taken."""
_EVEN = 0.3
"""Share of the average cost that is added to each container's cost when parts are picked."""
_KEPT = 0.9
"""Weight of earlier parts of a kind against the newest one, for how often the kind is tried."""
_EPS = 1e-9

Part = tuple[Ints, Ints]
"""Free objects, and the containers that they may go to."""


@dataclass
class _PartKind:
    """One way to pick parts, with the gain and the work of its parts."""

    pick: Callable[[int], Part]
    variables: float
    gained: float = 0.0
    work: float = 0.0

    def worth(self) -> float:
        """Return the gain of its parts for the solver's work; infinite before the first part."""
        return self.gained / self.work if self.work else math.inf

    def learn(self, answer: ProgramAnswer, gain: float) -> None:
        """Add the result of a part, and adapt the size of the next one."""
        self.gained = self.gained * _KEPT + gain
        self.work = self.work * _KEPT + answer.work
        grown = _SHRUNK if answer.work > _WORK else _GROWN if answer.is_optimal else 1.0
        self.variables = min(max(self.variables * grown, _LEAST), _MOST)


def improved(
    model: PlacementModel, clock: Callable[[], float], seconds: float, steps: int = 0, seed: int = 1
) -> PlacementAnswer:
    """Return the best placement found in `seconds`, or in `steps` if that is not 0."""
    began, state = clock(), PlacementState(model)
    before, annealing = state.total(), Annealing(state, seed, quick=True)
    parts = Neighbourhoods(state, seed)

    def progress() -> float:
        taken = annealing.steps / _STEPS_OF_ONE + parts.steps
        return taken / steps if steps else (clock() - began) / seconds

    def share(number: int, of: float) -> float:
        return cycle_progress(number, progress()) / of

    for number in range(len(CYCLES) if len(state.where) and len(model.containers) > 1 else 0):
        if parts.bound is None:
            annealing.cycle(number, partial(share, number, _ANNEALED))
            annealing.shake(partial(share, number, _SHAKEN))
            parts.run(progress, CYCLES[number].until)
    answer = answer_of(state, state.where.copy(), before, clock() - began, parts.steps)
    return answer if parts.bound is None else replace(answer, bound=parts.bound, is_optimal=True)


def _passed(progress: Callable[[], float], end: float) -> bool:
    return progress() > end


class Neighbourhoods:
    """One search, which begins with the present placement."""

    def __init__(self, state: PlacementState, seed: int, variables: int = _FIRST) -> None:
        """`variables`: number of variables of the first parts."""
        self.state, self.steps = state, 0
        self.bound: float | None = None
        """Lower bound of the sum of the goals; None until a part is the whole model."""
        self._rng = np.random.default_rng(seed)
        picks = (self._pick_containers, self._pick_costly, self._pick_objects, self._pick_groups)
        self._kinds = [_PartKind(pick, variables) for pick in picks]
        self._total = state.total()
        self._related_groups = [
            [g for counts in state.scopes.values() for g in counts.related(group)]
            for group in range(len(state.moved))
        ]

    def run(self, progress: Callable[[], float], until: float = 1.0) -> None:
        """Solve parts until `progress` reaches `until`, or the whole model is solved as one part.

        A part that is not solved by then is abandoned, because annealing uses the time better.
        """
        self._total = self.state.total()
        while progress() < until and self.bound is None:
            self.steps += 1
            kind = self._kinds[self._choose_kind()]
            free, containers = kind.pick(int(kind.variables))
            program = PlacementProgram(self.state, free, containers)
            end = max(until, progress())
            is_over = partial(_passed, progress, end)
            answer = program.solved(is_over, _PATIENCE, _NODES, _STUCK_S)
            if answer is None:
                kind.variables = max(kind.variables / 2, _LEAST)
                continue
            before = self._total
            self._apply_if_better(free, answer.where)
            kind.learn(answer, before - self._total)
            is_whole = len(free) == len(self.state.where)
            if answer.is_optimal and is_whole and len(containers) == len(self.state.offers):
                self.bound = min(before + answer.bound, self._total)

    def _choose_kind(self) -> int:
        """Return the number of the kind that gained most for its work; one in four is random."""
        if self._rng.random() < 1 / 4:
            return int(self._rng.integers(len(self._kinds)))
        return int(np.argmax([kind.worth() for kind in self._kinds]))

    def _apply_if_better(self, free: Ints, where: Ints) -> None:
        """Move objects to these containers, unless that exceeds room or is not better.

        Both are checked again, because the solver's precision is finite.
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

    def _probabilities(self) -> Floats:
        """Return the probability of picking each container, which rises with its cost."""
        cost = np.maximum(self.state.cost, 0.0)
        cost = cost + _EVEN * cost.mean() + _EPS
        return np.asarray(cost / cost.sum())

    def _pick_containers(self, variables: int) -> Part:
        """Return some containers, at least one that costs, and all objects in them."""
        picked = self._costly_first(self._rng.permutation(len(self.state.offers)))
        sizes = np.cumsum(self.state.objects_in[picked]) * np.arange(1, len(picked) + 1)
        picked = np.sort(picked[: max(2, int(np.searchsorted(sizes, variables, "right")))])
        return np.nonzero(np.isin(self.state.where, picked))[0], picked

    def _pick_costly(self, variables: int) -> Part:
        """Return all objects of a few, mostly costly containers; they may go anywhere."""
        state, chances = self.state, self._probabilities()
        order = self._rng.choice(len(chances), len(chances), replace=False, p=chances)
        most = max(1, variables // min(len(chances), _CONTAINERS))
        number = max(1, int(np.searchsorted(np.cumsum(state.objects_in[order]), most, "right")))
        free = np.nonzero(np.isin(state.where, order[:number]))[0]
        return free, self._target_containers(free)

    def _pick_objects(self, variables: int) -> Part:
        """Return a sample of objects, mostly of costly containers; they may go anywhere."""
        state = self.state
        most = variables // min(len(state.offers), _CONTAINERS)
        number = min(max(1, most), len(state.where))
        chances = self._probabilities()[state.where]
        free = self._rng.choice(len(state.where), number, replace=False, p=chances / chances.sum())
        free = np.sort(free)
        return free, self._target_containers(free)

    def _pick_groups(self, variables: int) -> Part:
        """Return the objects of groups that depend on each other; they may go anywhere."""
        state, found, seen = self.state, list[int](), set[int]()
        number = len(state.where)
        most = min(max(1, variables // min(len(state.offers), _CONTAINERS)), number)
        chances = self._probabilities()[state.where]
        firsts = self._rng.choice(number, number, replace=False, p=chances / chances.sum())
        queue = deque(state.group[firsts].tolist())
        while len(found) < most:
            group = queue.popleft()
            if group not in seen:
                seen.add(group)
                found += self._rng.permutation(np.nonzero(state.group == group)[0]).tolist()
                queue.extendleft(self._related_groups[group])
        free = np.sort(np.array(found[:most], np.int64))
        return free, self._target_containers(free)

    def _costly_first(self, order: Ints) -> Ints:
        """Return containers in the given order, but with a random, mostly costly one first."""
        first = int(self._rng.choice(len(order), p=self._probabilities()))
        return np.append(first, order[order != first])

    def _target_containers(self, free: Ints) -> Ints:
        """Return the containers to which objects may go: all, or a sample if there are many."""
        number = len(self.state.offers)
        if number <= _CONTAINERS:
            return np.arange(number)
        sample = self._rng.choice(number, _CONTAINERS, replace=False)
        return np.union1d(sample, self.state.where[free])
