"""Solves a placement model by simulated annealing, with shifts, exchanges and chains of objects.

Each step draws an object, and a container to which it may go or an object to exchange it with. The
step is done if it keeps every constraint and its cost is below a random threshold that falls with
the heat. Only the two containers determine the cost. Some steps are chains: an object goes to a
container from which others are ejected. The best placement so far is an answer at any time. The
same seed and number of steps give the same answer, compiled or not.

Heats are in units of the average change by a move. The first cycle has half of the time: most of
the gain is between the heats 0.6 and 0.002, and a slower pass through that range gains more. Later
cycles begin with less heat, where single steps still find what shakes and exact programs of parts
do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.language import PlacementAnswer, PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.placement_steps import EPS, compiled, cost_change, run_steps
from control_plane.rebalancer.core.step_tables import CHANGE, IS_BEST, view


class Cycle(NamedTuple):
    """One search from hot to cold, which begins with the best placement so far."""

    until: float
    """Share of the total time at its end."""
    hot: float
    """Heat at its start, in units of the average change by a move."""
    chains: float
    """Share of the steps that are chains."""


CYCLES = (
    Cycle(until=0.5, hot=0.6, chains=0.005),
    Cycle(until=0.7, hot=0.03, chains=0.01),
    Cycle(until=0.85, hot=0.01, chains=0.001),
    Cycle(until=1.0, hot=0.003, chains=0.01),
)
"""One slow cycle gains more than several quick ones; the best share of chains differs by model.

If prices are most of the sum, the cycles after the first one are cycles of prices. The first cycle
moves objects as if moves were free, and passes the heat of prices too fast to return them all.
"""
_PRICE_HEAT_FIRST, _PRICE_HEAT_LAST = 0.3, 0.03
"""First and last heat of a cycle of prices: the first in average changes by a move, the last in
average prices of a move."""
_PRICE_PER_HEAT = 4.5
"""The least price of a move in a cycle of prices, as a multiple of the heat. With 4.6 (log 99), an
object that can go to 100 containers is in its origin half of the time."""
_PRICES_MIN = 0.5
"""A cycle of prices runs if prices are more than this share of the sum."""
_COLD, _LAST = 2e-3, 1e-8
"""Heats: amounts settle above `_COLD`, small prices between it and `_LAST`."""
_SLOW = 0.85
"""Share of a cycle that leads to `_COLD`."""
_EXCHANGED, _RETURNED = 0.5, 0.1
"""Shares of the steps that exchange two objects, and that return an object to its origin.

If a moved object holds room in two containers for a while, few objects can move. Returns find out
which of them should.
"""
_SAMPLED = 400
_BLOCK, _BLOCKS = 4096, 64
"""Steps of a block, which has one heat, and the least blocks of a run. A short run has smaller
blocks."""
_DRAWS_MIN = 2048
"""The least number of random containers for a call of the compiled steps."""
_TRIED = 50
"""The most containers that are tried for the object that starts a shake."""
_WARM = (-4.0, -1.0)
"""A shake starts with a heat of ten to a power in this range."""
_SHAKEN, _SHAKEN_COLD = 100, 1e-5
"""Blocks of a shake, and the factor of its last heat."""


def annealed(
    model: PlacementModel, clock: Callable[[], float], seconds: float, steps: int = 0, seed: int = 1
) -> PlacementAnswer:
    """Return the best placement found in `seconds`, or in `steps` if that is not 0."""
    began, search = clock(), Annealing(PlacementState(model), seed)
    before = search.state.total()
    if len(search.state.where) and len(model.containers) > 1:
        search.run(lambda: search.steps / steps if steps else (clock() - began) / seconds, steps)
    return answer_of(search.state, search.state.where.copy(), before, clock() - began, search.steps)


def answer_of(
    state: PlacementState, where: Ints, before: float, took_s: float, steps: int = 0
) -> PlacementAnswer:
    """Return a placement as an answer; its sum of goals is computed again."""
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


def cycle_progress(number: int, done: float) -> float:
    """Return the progress of a cycle at the progress `done` of the whole run, both from 0 to 1."""
    began = CYCLES[number - 1].until if number else 0.0
    return max(0.0, (done - began) / (CYCLES[number].until - began))


def _progress_of_cycle(progress: Callable[[], float], number: int) -> float:
    return cycle_progress(number, progress())


def heat_of_prices(done: float, price: float) -> float:
    """Return the heat of a cycle of prices at its progress `done`.

    Heat and `price`, the average price of a move, are in average changes by a move.
    """
    return _PRICE_HEAT_FIRST * float(
        (min(1.0, price) * _PRICE_HEAT_LAST / _PRICE_HEAT_FIRST) ** done
    )


def heat_of(number: int, done: float) -> float:
    """Return the heat of a cycle at its progress `done`, in average changes by a move."""
    hot = CYCLES[number].hot
    if done < _SLOW:
        return hot * float((_COLD / hot) ** (done / _SLOW))
    return _COLD * float((_LAST / _COLD) ** ((done - _SLOW) / (1.0 - _SLOW)))


class Annealing:
    """One search, which begins with the present placement."""

    def __init__(self, state: PlacementState, seed: int, *, quick: bool = False) -> None:
        """`quick`: steps are compiled, if numba is installed."""
        self.state, self.steps = state, 0
        self._compiled_steps = compiled() if quick else None
        self._rng, self._chains = np.random.default_rng(seed), CYCLES[0].chains
        self._unit = self._average_change() if len(state.where) else 1.0
        priced = state.price[state.price > 0.0]
        self._mean_price = float(priced.mean()) / self._unit if len(priced) else 0.0

    def run(self, progress: Callable[[], float], steps: int = 0) -> None:
        """Run all cycles until `progress` is 1. With few `steps`, blocks are smaller."""
        for number in range(len(CYCLES)):
            self.cycle(number, partial(_progress_of_cycle, progress, number), steps)

    def cycle(self, number: int, progress: Callable[[], float], steps: int = 0) -> None:
        """Search once from hot to cold, from the present placement; end with the best one."""
        block = min(_BLOCK, 1 + steps // _BLOCKS) if steps else _BLOCK
        t, self._chains = self.state.tables, CYCLES[number].chains
        paid = self.state.paid() if number and self._mean_price else 0.0
        if paid > _PRICES_MIN * self.state.total():
            self._cycle_of_prices(progress, block)
            return
        t.sums[:], t.registers[IS_BEST] = 0.0, 1
        while (done := progress()) < 1.0:
            self._run_block(block, self._unit * heat_of(number, done))
        self._restore_best()

    def _cycle_of_prices(self, progress: Callable[[], float], block: int) -> None:
        """Cool while each move costs several times the heat, so that only needed moves stay.

        Sums with raised prices are not comparable. So the placement at the start counts as the best
        until prices have their own values again.
        """
        t, state = self.state.tables, self.state
        prices, before = (t.price.copy(), t.distance.copy()), state.total()
        t.best[:], t.sums[:], t.registers[IS_BEST] = t.where, (0.0, -np.inf), 0
        is_raised = True
        while (done := progress()) < 1.0:
            heat = heat_of_prices(done, self._mean_price)
            factor = max(1.0, _PRICE_PER_HEAT * heat / self._mean_price)
            if is_raised:
                t.price[:], t.distance[:] = (factor * each for each in prices)
            if is_raised and factor == 1.0:
                is_raised = False
                gained = state.total() - before
                t.sums[:], t.registers[IS_BEST] = (gained, min(0.0, gained)), gained < 0.0
            self._run_block(block, self._unit * heat)
        t.price[:], t.distance[:] = prices
        self._restore_best()

    def shake(self, progress: Callable[[], float], blocks: int = _SHAKEN) -> None:
        """Repeat: do one chain at any cost, then cool. Each time starts with the best placement."""
        t, containers = self.state.tables, len(self.state.offers)
        while progress() < 1.0:
            t.sums[:], t.registers[IS_BEST] = 0.0, 1
            firsts, places = np.zeros(1, np.int64), len(self.state.where) + containers
            for other in self._rng.integers(containers, size=(_TRIED, 1)):
                self._run_steps(firsts, places + other, np.full(1, np.inf))
                if t.sums[CHANGE]:
                    break
            hot, block = self._unit * 10.0 ** self._rng.uniform(*_WARM), 0
            while block < blocks and progress() < 1.0:
                self._run_block(_BLOCK, hot * _SHAKEN_COLD ** (block / blocks))
                block += 1
            self._restore_best()

    def _restore_best(self) -> None:
        """Return to the best placement."""
        t = self.state.tables
        if not t.registers[IS_BEST]:
            for i in np.nonzero(t.where != t.best)[0].tolist():
                self.state.move(i, int(t.best[i]))

    def _average_change(self) -> float:
        """Return the average change of the sum of goals by a move, from a sample of moves."""
        changes = [0.0]
        state, t = self.state, self.state.views
        firsts, seconds = self._draw_steps(_SAMPLED)
        nothing = len(state.where)
        for i, j in zip(firsts.tolist(), seconds.tolist(), strict=True):
            if nothing <= j < nothing + len(state.offers) and j - nothing != state.where[i]:
                changes.append(abs(cost_change(t, i, nothing, int(state.where[i]), j - nothing)))
        some = [change for change in changes if change > EPS]
        return float(np.mean(some)) if some else 1.0

    def _draw_steps(self, number: int) -> tuple[Ints, Ints]:
        """Return random steps as objects and seconds, as `run_steps` takes them."""
        objects, containers = len(self.state.where), len(self.state.offers)
        draw = self._rng
        firsts, others = draw.integers(objects, size=number), draw.integers(objects, size=number)
        places = objects + draw.integers(containers, size=number)
        kind = draw.random(number)
        places = np.where(kind < 1.0 - self._chains, places, places + containers)
        places = np.where(
            kind < _EXCHANGED + _RETURNED, objects + self.state.origin[firsts], places
        )
        return firsts, np.where(kind < _EXCHANGED, others, places)

    def _run_block(self, number: int, heat: float) -> None:
        firsts, seconds = self._draw_steps(number)
        self._run_steps(firsts, seconds, heat * self._rng.standard_exponential(number))

    def _run_steps(self, firsts: Ints, seconds: Ints, max_changes: Floats) -> None:
        number = max(len(firsts), _DRAWS_MIN)
        draws = self._rng.integers(len(self.state.offers), size=number)
        self.steps += len(firsts)
        if self._compiled_steps is not None:
            self._compiled_steps(self.state.tables, firsts, seconds, draws, max_changes)
        else:
            run_steps(self.state.views, view(firsts), view(seconds), view(draws), view(max_changes))
