"""Solves a placement model by annealing: shifts, exchanges and chains, ever colder.

Each step draws one object, and a container where it may go or an object to exchange it with. It is
done if that keeps every constraint and costs at most what chance and heat allow; what it changes is
known from the two containers alone. Some steps let an object in where others leave first. The best
placement seen is an answer whenever the time is over. The same seed and number of steps give the
same answer, compiled or not.

The first cycle has half of the time: most of the gain is between 0.6 and 0.002 of what moves change
on average, and the slower that range is passed, the better. Later cycles begin with less heat,
where single steps still find what shakes and exact programs of parts do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from control_plane.rebalancer.core.arrays import Floats, Ints
from control_plane.rebalancer.core.language import PlacementAnswer, PlacementModel
from control_plane.rebalancer.core.placement_state import PlacementState
from control_plane.rebalancer.core.placement_steps import EPS, change_of, compiled, walk
from control_plane.rebalancer.core.step_tables import view


class Cycle(NamedTuple):
    """One search from hot to cold, which begins with the best placement so far."""

    until: float
    """Share of the total time that has passed at its end."""
    hot: float
    """Heat at its begin, in units of the average change of a move."""
    chains: float
    """Share of the steps that bring an object to a container that others leave."""


CYCLES = (
    Cycle(until=0.5, hot=0.6, chains=0.005),
    Cycle(until=0.7, hot=0.03, chains=0.01),
    Cycle(until=0.85, hot=0.01, chains=0.001),
    Cycle(until=1.0, hot=0.003, chains=0.01),
)
"""One slow cycle is worth more than several quick ones; which share of chains is best differs.

Those after the first are cycles of prices where these are most of the sum: the first one moves
objects as if that were free, and passes the heat of prices too fast to bring them all back.
"""
_DEAR, _CHEAP = 0.3, 0.03
"""Heats of a cycle of prices: at its begin in what moves change on average, at its end in what a
move costs on average."""
_KEENLY = 4.5
"""The least cost of a move in a cycle of prices, as a multiple of the heat. With 4.6 (log 99), an
object that can go to 100 containers is at home half of the time."""
_MOSTLY = 0.5
"""A cycle of prices runs if prices are more than this share of the sum."""
_COLD, _LAST = 2e-3, 1e-8
"""Heats: amounts are settled above `_COLD`, small prices between it and `_LAST`."""
_SLOW = 0.85
"""Share of a cycle that leads to `_COLD`."""
_EXCHANGED, _BACK = 0.5, 0.1
"""Shares of the steps that exchange two objects, and that bring one back to where it was at first.

What moved holds room in two containers where both versions run for a while: then few objects can
move at all, and which of them should is found by letting others return.
"""
_SAMPLED = 400
_BLOCK, _BLOCKS = 4096, 64
"""Steps at one heat, and the least blocks of a run; a short run has fewer steps per block."""
_LOTS = 2048
"""The least number of containers that are drawn for a call of the compiled steps."""
_TRIED = 50
"""The most containers that are tried for the object that begins a shake."""
_WARM = (-4.0, -1.0)
"""A shake begins with a heat of ten to one of these powers, in what moves change on average."""
_SHAKEN, _SHAKEN_COLD = 100, 1e-5
"""Blocks of a shake, and how much colder it ends."""


def annealed(
    model: PlacementModel, clock: Callable[[], float], seconds: float, steps: int = 0, seed: int = 1
) -> PlacementAnswer:
    """Return the best placement found in `seconds`, or in a number of `steps` if given."""
    began, search = clock(), Annealing(PlacementState(model), seed)
    before = search.state.total()
    if len(search.state.where) and len(model.containers) > 1:
        search.run(lambda: search.steps / steps if steps else (clock() - began) / seconds, steps)
    return answer_of(search.state, search.state.where.copy(), before, clock() - began, search.steps)


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


def within(number: int, done: float) -> float:
    """Return the share of a cycle that is over when the share `done` of the total time is over."""
    began = CYCLES[number - 1].until if number else 0.0
    return max(0.0, (done - began) / (CYCLES[number].until - began))


def _share(progress: Callable[[], float], number: int) -> float:
    return within(number, progress())


def heat_of_prices(done: float, price: float) -> float:
    """Return how hot a cycle of prices is, in what moves change on average, as is `price`."""
    return _DEAR * float((min(1.0, price) * _CHEAP / _DEAR) ** done)


def heat_of(number: int, done: float) -> float:
    """Return how hot a cycle is, in what moves change on average."""
    hot = CYCLES[number].hot
    if done < _SLOW:
        return hot * float((_COLD / hot) ** (done / _SLOW))
    return _COLD * float((_LAST / _COLD) ** ((done - _SLOW) / (1.0 - _SLOW)))


class Annealing:
    """One search from where objects are."""

    def __init__(self, state: PlacementState, seed: int, *, quick: bool = False) -> None:
        """Change nothing yet; `quick`: steps are compiled if numba is there."""
        self.state, self.steps = state, 0
        self._walk = compiled() if quick else None
        self._rng, self._chains = np.random.default_rng(seed), CYCLES[0].chains
        self._unit = self._size() if len(state.where) else 1.0
        priced = state.price[state.price > 0.0]
        self._price = float(priced.mean()) / self._unit if len(priced) else 0.0

    def run(self, progress: Callable[[], float], steps: int = 0) -> None:
        """Search until `progress` is 1; of few `steps`, fewer are made at one heat."""
        for number in range(len(CYCLES)):
            self.cycle(number, partial(_share, progress, number), steps)

    def cycle(self, number: int, progress: Callable[[], float], steps: int = 0) -> None:
        """Search once from hot to cold, from where objects are; end with the best placement."""
        block = min(_BLOCK, 1 + steps // _BLOCKS) if steps else _BLOCK
        t, self._chains = self.state.tables, CYCLES[number].chains
        paid = self.state.paid() if number and self._price else 0.0
        if paid > _MOSTLY * self.state.total():
            self._cycle_of_prices(progress, block)
            return
        t.sums[:], t.marks[1] = 0.0, 1
        while (done := progress()) < 1.0:
            self._block(block, self._unit * heat_of(number, done))
        self._settle()

    def _cycle_of_prices(self, progress: Callable[[], float], block: int) -> None:
        """Cool while each move costs several times the heat, so that only needed moves stay.

        Sums with raised prices are not comparable: until prices have their own values again, the
        placement at the begin counts as the best.
        """
        t, state = self.state.tables, self.state
        prices, before = (t.price.copy(), t.distance.copy()), state.total()
        t.best[:], t.sums[:], t.marks[1] = t.where, (0.0, -np.inf), 0
        is_dear = True
        while (done := progress()) < 1.0:
            heat = heat_of_prices(done, self._price)
            dearer = max(1.0, _KEENLY * heat / self._price)
            if is_dear:
                t.price[:], t.distance[:] = (dearer * each for each in prices)
            if is_dear and dearer == 1.0:
                is_dear = False
                gained = state.total() - before
                t.sums[:], t.marks[1] = (gained, min(0.0, gained)), gained < 0.0
            self._block(block, self._unit * heat)
        t.price[:], t.distance[:] = prices
        self._settle()

    def shake(self, progress: Callable[[], float], blocks: int = _SHAKEN) -> None:
        """Bring an object where others must leave for it, at any cost, and cool; again and again.

        Each time begins with the best placement, and so does the end.
        """
        t, containers = self.state.tables, len(self.state.offers)
        while progress() < 1.0:
            t.sums[:], t.marks[1] = 0.0, 1
            firsts, places = np.zeros(1, np.int64), len(self.state.where) + containers
            for other in self._rng.integers(containers, size=(_TRIED, 1)):
                self._steps(firsts, places + other, np.full(1, np.inf))
                if t.sums[0]:
                    break
            hot, block = self._unit * 10.0 ** self._rng.uniform(*_WARM), 0
            while block < blocks and progress() < 1.0:
                self._block(_BLOCK, hot * _SHAKEN_COLD ** (block / blocks))
                block += 1
            self._settle()

    def _settle(self) -> None:
        """Return to the best placement."""
        t = self.state.tables
        if not t.marks[1]:
            for i in np.nonzero(t.where != t.best)[0].tolist():
                self.state.move(i, int(t.best[i]))

    def _size(self) -> float:
        """Return what steps of some objects change on average."""
        found = [0.0]
        state, t = self.state, self.state.views
        firsts, seconds = self._drawn(_SAMPLED)
        nothing = len(state.where)
        for i, j in zip(firsts.tolist(), seconds.tolist(), strict=True):
            if nothing <= j < nothing + len(state.offers) and j - nothing != state.where[i]:
                found.append(abs(change_of(t, i, nothing, int(state.where[i]), j - nothing)))
        some = [change for change in found if change > EPS]
        return float(np.mean(some)) if some else 1.0

    def _drawn(self, number: int) -> tuple[Ints, Ints]:
        """Return objects, and what they are exchanged with or where they go."""
        objects, containers = len(self.state.where), len(self.state.offers)
        draw = self._rng
        firsts, others = draw.integers(objects, size=number), draw.integers(objects, size=number)
        places = objects + draw.integers(containers, size=number)
        kind = draw.random(number)
        places = np.where(kind < 1.0 - self._chains, places, places + containers)
        places = np.where(kind < _EXCHANGED + _BACK, objects + self.state.origin[firsts], places)
        return firsts, np.where(kind < _EXCHANGED, others, places)

    def _block(self, number: int, heat: float) -> None:
        firsts, seconds = self._drawn(number)
        self._steps(firsts, seconds, heat * self._rng.standard_exponential(number))

    def _steps(self, firsts: Ints, seconds: Ints, bars: Floats) -> None:
        number = max(len(firsts), _LOTS)
        lots = self._rng.integers(len(self.state.offers), size=number)
        self.steps += len(firsts)
        if self._walk is not None:
            self._walk(self.state.tables, firsts, seconds, lots, bars)
        else:
            walk(self.state.views, view(firsts), view(seconds), view(lots), view(bars))
