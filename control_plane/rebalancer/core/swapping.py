"""Which machines entitlements should exchange: an integer program over classes of machines (RE3).

A cell is a type of machine, inside or outside of places that draw more power than they bear. The
program says how many machines each entitlement gives away and gets by cell. It counts the types
that an entitlement has (each is one more kind of room that jobs must fit), and machines of busy
entitlements in places without power. Entitlements keep their number of machines and, nearly, their
capacity. Of its answer those pairs are made in which both sides get what the other gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from control_plane.api.rebalancing import SwapView
from control_plane.rebalancer.core.model import Weights
from control_plane.rebalancer.core.state import State

Cell = tuple[int, bool]
"""A class of machines, and whether its machines are in a place above its power budget."""
_KEPT = 0.95
"""The least share of its CPU and memory that an entitlement keeps."""
_SECONDS = 10.0
_CANDIDATES = 8
"""The most machines per entitlement and cell that are checked for one that can be emptied."""


@dataclass(slots=True)
class Cells:
    """Machines of each entitlement by cell."""

    here: defaultdict[tuple[int, Cell], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    all: dict[Cell, list[int]] = field(default_factory=dict)
    admitted: list[list[bool]] = field(default_factory=list)
    """By entitlement and machine: whether each of its tasks may run there."""

    def have(self, pool: int, cell: Cell) -> int:
        """Return how many machines an entitlement has in a cell."""
        return len(self.here.get((pool, cell), ()))


def swaps(state: State, most: int) -> list[SwapView]:
    """Return at most `most` exchanges that gain more than their price; none without HiGHS.

    `state` is the region after the moves of the plan; this function moves tasks in it.
    """
    try:
        import highspy  # noqa: F401
    except ImportError:
        return []
    if most < 1 or not state.model.machine_class:
        return []
    cells = _cells(state)
    gives, gets = _solved(state, cells, most)
    found: list[SwapView] = []
    for one, two, give, get in _pairs(gives, gets):
        if len(found) < most and (step := _step(state, cells, (one, give), (two, get))):
            found.append(step)
    return found


def _cells(state: State) -> Cells:
    found, model = Cells(), state.model
    hot = state.power.hot() if state.power.is_budgeted else np.zeros(len(model.machines), bool)
    for machine in np.nonzero(~state.is_free)[0].tolist():
        cell = model.machine_class[machine], bool(hot[machine])
        found.here[int(state.pool[machine]), cell].append(machine)
        found.all.setdefault(cell, []).append(machine)
    masks = np.array([np.frombuffer(mask, np.uint8) for mask in model.admissions], bool)
    for pool in range(len(model.pools)):
        needed = np.unique(state.admission[state.kind[state.pool[state.where] == pool]])
        found.admitted.append(
            masks[needed].all(axis=0).tolist() if len(needed) else [True] * len(hot)
        )
    return found


def _solved(
    state: State, cells: Cells, most: int
) -> tuple[Counter[tuple[int, Cell]], Counter[tuple[int, Cell]]]:
    """Return by entitlement and cell how many machines are given away, and got."""
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.setOptionValue("time_limit", _SECONDS)
    gives, gets = _transfers(solver, state, cells, most)
    costs = [state.model.weights.swap / 2 * given for given in gives.values()]
    for pool in range(len(state.model.pools)):
        mine = [cell for cell in cells.all if (pool, cell) in gives or (pool, cell) in gets]
        change = {cell: gets.get((pool, cell), 0) - gives.get((pool, cell), 0) for cell in mine}
        if change:
            _keep_size(solver, state, cells, pool, change)
            costs += _fragments(solver, cells, pool, change, state.model.weights)
            costs += _in_hot_places(state, pool, change)
    solver.addConstr(sum(gives.values()) <= 2 * most)
    solver.minimize(sum(costs))
    if solver.getModelStatus() not in (
        highspy.HighsModelStatus.kOptimal,
        highspy.HighsModelStatus.kTimeLimit,
    ):
        return Counter(), Counter()
    values = solver.getSolution().col_value
    return (
        Counter({key: round(values[v.index]) for key, v in gives.items()}),
        Counter({key: round(values[v.index]) for key, v in gets.items()}),
    )


def _transfers(
    solver: Any, state: State, cells: Cells, most: int
) -> tuple[dict[tuple[int, Cell], Any], dict[tuple[int, Cell], Any]]:
    """Add the machines that each entitlement gives away and gets, by cell: equally many of each."""
    gives, gets = {}, {}
    for key, machines in cells.here.items():
        free = sum(state.model.swappable[m] for m in machines)
        gives[key] = solver.addIntegral(lb=0, ub=min(free, most))
    for pool, admitted in enumerate(cells.admitted):
        for cell, machines in sorted(cells.all.items()):
            usable = sum(admitted[m] for m in machines)
            if usable:
                gets[pool, cell] = solver.addIntegral(lb=0, ub=min(usable, most))
    for cell in cells.all:
        given = [v for (_, c), v in gives.items() if c == cell]
        got = [v for (_, c), v in gets.items() if c == cell]
        solver.addConstr(sum(given) - sum(got) == 0)
    return gives, gets


def _keep_size(solver: Any, state: State, cells: Cells, pool: int, change: dict[Cell, Any]) -> None:
    """Let an entitlement keep its number of machines, and most of its CPU and memory."""
    solver.addConstr(sum(change.values()) == 0)
    for d in (0, 1):
        size = {cell: float(state.sizes[cells.all[cell][0], d]) for cell in change}
        had = sum(size[cell] * cells.have(pool, cell) for cell in change)
        if had > 0:
            parts = sum(size[cell] / had * by for cell, by in change.items())
            solver.addConstr(parts >= _KEPT - 1.0)


def _fragments(
    solver: Any, cells: Cells, pool: int, change: dict[Cell, Any], weights: Weights
) -> Iterator[object]:
    """Yield the cost of each type that an entitlement has machines of."""
    for kind in {cell[0] for cell in change}:
        of_kind = [cell for cell in change if cell[0] == kind]
        had = sum(cells.have(pool, cell) for cell in of_kind)
        most = had + sum(len(cells.all[cell]) for cell in of_kind)
        any_of = solver.addBinary()
        after = sum(change[cell] for cell in of_kind) + had
        solver.addConstr(after <= most * any_of)
        yield weights.fragment * any_of


def _in_hot_places(state: State, pool: int, change: dict[Cell, Any]) -> Iterator[object]:
    """Yield what machines of an entitlement draw, as it uses them, in places without power."""
    mine = np.nonzero((state.pool == pool) & ~state.is_free)[0]
    size = float(state.sizes[mine, 0].sum())
    share = float(state.used[mine, 0].sum()) / size if size else 0.0
    for cell, by in change.items():
        if cell[1]:
            yield state.model.weights.power * share * by


def _pairs(
    gives: Counter[tuple[int, Cell]], gets: Counter[tuple[int, Cell]]
) -> Iterator[tuple[int, int, Cell, Cell]]:
    """Yield exchanges of two pools: both pools, and the cell that each gives."""
    gives, gets = +gives, +gets
    for one, give in sorted(gives):
        for two, get in sorted(gives):
            sides = ((one, give), (two, get)), ((one, get), (two, give))
            while (
                one < two
                and give != get
                and min(gives[side] for side in sides[0]) > 0
                and min(gets[side] for side in sides[1]) > 0
            ):
                gives.subtract(sides[0])
                gets.subtract(sides[1])
                yield one, two, give, get


def _step(
    state: State, cells: Cells, one: tuple[int, Cell], two: tuple[int, Cell]
) -> SwapView | None:
    """Return an exchange of two machines that can be emptied now; None: there are none."""
    found = (
        _emptied(state, [m for m in cells.here[side] if cells.admitted[other[0]][m]])
        for side, other in ((one, two), (two, one))
    )
    picked = [machine for machine in found if machine is not None]
    if len(picked) < 2:
        return None
    model, weights = state.model, state.model.weights
    fragments = [
        sum(cells.have(side[0], (side[1][0], hot)) for hot in (False, True)) for side in (one, two)
    ]
    words = [
        f"{model.pools[side[0]]} has {left} machines of the type of {model.machines[machine]}"
        for side, left, machine in zip((one, two), fragments, picked, strict=True)
        if one[1][0] != two[1][0]
    ]
    hot = [side for side in (one, two) if side[1][1]]
    words += [f"{model.pools[side[0]]} is busy in a place without power" for side in hot]
    gone = sum(left == 1 for left in fragments) if one[1][0] != two[1][0] else 0
    for side, machine in zip((one, two), picked, strict=True):
        cells.here[side].remove(machine)
    return SwapView(
        id="",
        one=model.machines[picked[0]],
        two=model.machines[picked[1]],
        gain=weights.fragment * gone + weights.power * len(hot),
        price=weights.swap,
        why="; ".join(words),
    )


def _emptied(state: State, machines: list[int]) -> int | None:
    """Return the machine with the fewest tasks whose tasks all find room in its entitlement."""
    able = [m for m in machines if state.model.swappable[m]]
    for machine in sorted(able, key=lambda m: (len(state.on[m]), m))[:_CANDIDATES]:
        moved: list[int] = []
        candidates = np.nonzero(
            (state.pool == state.pool[machine]) & state.is_open & ~state.is_free
        )[0]
        candidates = candidates[candidates != machine]
        for task in list(state.on[machine]):
            to = _room_for(state, task, candidates)
            if to is None:
                break
            state.move(task, to)
            moved.append(task)
        if not state.on[machine]:
            return machine
        for task in reversed(moved):
            state.move(task, machine)
    return None


def _room_for(state: State, task: int, candidates: np.ndarray) -> int | None:
    if not state.can_move[task] or not len(candidates):
        return None
    candidates = candidates[state.fits(state.kind[task : task + 1], candidates)[0]]
    shares = (state.used[candidates] * state.per_size[candidates]).max(axis=1, initial=0.0)
    for candidate in candidates[np.argsort(shares, kind="stable")][:_CANDIDATES].tolist():
        if _may_wait_there(state, task, candidate):
            return int(candidate)
    return None


def _may_wait_there(state: State, task: int, to: int) -> bool:
    """Return whether a task may be on a machine until its entitlement has another one.

    A job may be less even for that time, as while any machine is drained; no limit is exceeded.
    """
    job = int(state.job[task])
    return all(
        rule.even and not 0 < rule.at_most < state.counts[job, number, there] + 1
        for number, rule, _, there in state.crossed(task, to)
    )
