"""Solves a placement model by annealing: shifts and exchanges, hot at first, then ever colder.

Each step takes one object, scores all containers for it at once (or all objects to exchange it
with) and picks among them by chance, the better the likelier (a heat bath). Each step keeps every
constraint, so the best placement seen is an answer whenever the time is over. The same seed and
number of steps give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from control_plane.rebalancer.core.language import PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.state import Floats, Ints

_HOT, _COLD = 0.5, 1e-3
"""At the begin of the first cycle, in what moves change on average; a cycle ends so much colder."""
_CYCLES = 4
"""Each begins with the best placement so far, and a quarter as hot as the one before."""
_EXCHANGED = 192
"""Objects that are looked at for an exchange."""
_SAMPLED = 200
_EPS = 1e-9


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Where objects should be."""

    before: float
    after: float
    moves: list[tuple[str, str, str]]
    """Object, from, to."""
    bound: float | None = None
    """No placement is better; None: not known."""
    steps: int = 0
    took_s: float = 0.0
    is_optimal: bool = False


def annealed(
    model: PlacementModel, clock: Callable[[], float], seconds: float, steps: int = 0, seed: int = 1
) -> PlacementAnswer:
    """Return the best placement found in so many seconds, or in so many `steps` if given."""
    began, search = clock(), Annealing(PlacementState(model), seed)
    before = search.state.total()
    if len(search.state.where) and len(model.containers) > 1:
        search.run(lambda: search.steps / steps if steps else (clock() - began) / seconds)
    return answer_of(search.state, search.best, before, clock() - began, search.steps)


def answer_of(
    state: PlacementState, where: Ints, before: float, took_s: float, steps: int = 0
) -> PlacementAnswer:
    """Return a placement as an answer; its sum is counted again."""
    model, origin = state.model, state.origin
    for i in np.nonzero(state.where != where)[0].tolist():
        state.move(i, int(where[i]))
    return PlacementAnswer(
        before=before,
        after=state.total(),
        moves=[
            (model.objects[i].name, model.objects[i].at, model.containers[int(where[i])].name)
            for i in np.nonzero(where != origin)[0].tolist()
        ],
        steps=steps,
        took_s=took_s,
    )


class Annealing:
    """One search from where objects are."""

    def __init__(self, state: PlacementState, seed: int) -> None:
        """Change nothing yet."""
        self.state, self.steps = state, 0
        self.best, self._best_change, self._change = state.where.copy(), 0.0, 0.0
        self._rng = np.random.default_rng(seed)

    def run(self, progress: Callable[[], float]) -> None:
        """Search until `progress` is 1."""
        unit = self._unit()
        while (done := progress()) < 1.0:
            cycle = int(done * _CYCLES)
            hot = _HOT * unit / 4**cycle
            at = done * _CYCLES - cycle
            if self.steps and cycle > int(self._last * _CYCLES):
                self.end()
            self._last = done
            self._step(hot * _COLD**at)

    _last = 0.0

    def _unit(self) -> float:
        """Return what moves of some objects change on average."""
        state, found = self.state, list[float]()
        for i in self._rng.integers(0, len(state.where), _SAMPLED).tolist():
            changes = np.abs(state.changes(i)[state.allowed(i)])
            found += changes[changes > _EPS].tolist()
        return float(np.mean(found)) if found else 1.0

    def end(self) -> None:
        """Go back to the best placement; it keeps every constraint, whatever is on the way."""
        for i in np.nonzero(self.state.where != self.best)[0].tolist():
            self.state.move(i, int(self.best[i]))
        self._change = self._best_change

    def _step(self, heat: float) -> None:
        self.steps += 1
        i = int(self._rng.integers(len(self.state.where)))
        if self.steps % 3:
            self._shift(i, heat)
        else:
            self._exchange(i, heat)
        if self._change < self._best_change - _EPS:
            self._best_change = self._change
            self.best = self.state.where.copy()

    def _shift(self, i: int, heat: float) -> None:
        state = self.state
        allowed = np.nonzero(state.allowed(i))[0]
        if len(allowed) < 2:
            return
        changes = state.changes(i)[allowed]
        to = int(self._picked(changes, heat))
        state.move(i, int(allowed[to]))
        self._change += float(changes[to])

    def _exchange(self, i: int, heat: float) -> None:
        state, number = self.state, len(self.state.where)
        others = np.arange(number)
        if number > _EXCHANGED:
            others = self._rng.integers(0, number, _EXCHANGED)
        changes = state.exchanges(i, others)
        k = self._picked(np.append(changes, 0.0), heat)
        if k == len(others):
            return
        j = int(others[k])
        here, there = int(state.where[i]), int(state.where[j])
        change = self._done(i, there, j, here)
        if change is None:
            return
        if change > changes[k] and self._rng.random() > np.exp((changes[k] - change) / heat):
            state.move(i, here)
            state.move(j, there)
            return
        self._change += change

    def _done(self, i: int, there: int, j: int, here: int) -> float | None:
        """Exchange two objects; return what that changes, None if a group's rules forbid it."""
        state = self.state
        if not state.may_go(i, there):
            return None
        change = float(state.changes(i)[there])
        state.move(i, there)
        if not state.may_go(j, here):
            state.move(i, here)
            return None
        change += float(state.changes(j)[here])
        state.move(j, here)
        return change

    def _picked(self, changes: Floats, heat: float) -> int:
        """Return one of the changes by chance: those that gain are the likeliest."""
        chance = self._rng.standard_exponential(len(changes))
        return int(np.argmin(changes + heat * np.log(chance)))
